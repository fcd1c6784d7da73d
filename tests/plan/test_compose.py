"""The command line: composition, defaults, and one clear line for whatever is wrong."""

import pytest
from helpers import cells, config

from lorabench import recommend
from lorabench.contract.names import NameUnknown
from lorabench.plan.compose import ConfigError, names_in, plan, workload
from lorabench.plan.registry import ablation
from lorabench.sweep import help_text, main


def test_defaults_are_peft_as_it_comes_with_sdpa_foreach_and_padding():
    made = plan(config(), "cpu")
    assert [a.name for a in made.cells[0].reference] == ["sdpa", "adamw_foreach", "padding"]
    assert made.cells[0].model.name == "smollm2-135m"
    assert made.cells[0].toggles == ()
    assert made.cells[0].trials == 10
    assert plan(config(), "cuda").cells[0].trials == 30
    assert plan(config(), "cuda").cells[0].workload.name == "4x2048"


def test_every_kind_has_toggles_of_its_own_where_none_are_named():
    def named(*overrides):
        made = plan(config("workload=auto", *overrides), "cpu").cells
        return {t.name for c in made for t in c.toggles}, {c.kind for c in made}

    assert named("kind=load", "models=[tiny-llama]") == ({"parallel_reading"}, {"load"})
    assert named("kind=evaluate", "models=[tiny-llama]") == ({"text_metrics"}, {"evaluate"})
    of_op = {"lora_addmm", "lora_kernels", "bare_linear"}
    assert named("models=[linear-8x8@1x4]", "reference=linear") == (of_op, {"op", "limit"})
    both, kinds = named("models=[tiny-llama,load:tiny-llama]")
    assert {"eager", "packing", "parallel_reading"} <= both and kinds == {"train", "load"}
    assert named("models=[tiny-llama]", "ablations=[]")[0] == set()


def test_overrides_reach_the_cells():
    cell = cells("lora.r=7", "seed=3", "warmup=4", "dtype=float16", "reference=peft_low", "ablations=[eager]")[1]
    assert (cell.model.lora.r, cell.seed, cell.warmup, cell.model.dtype) == (7, 3, 4, "float16")
    assert "adapters_in_compute_dtype" in [a.name for a in cell.reference]
    assert [a.name for a in cell.toggles] == ["eager"]


def test_a_model_may_have_a_workload_of_its_own():
    made = plan(config("models=[tiny-llama,tiny-llama@1x8]", "workload=2x16", "ablations=[eager]"), "cpu").cells
    assert [c.workload.name for c in made] == ["2x16", "2x16", "1x8", "1x8"]


def test_several_baselines_give_every_cell_once_against_each():
    made = cells("reference=[peft,peft_low]", "ablations=[eager]")
    low = ["adapters_in_compute_dtype" in [a.name for a in c.reference] for c in made]
    assert low == [False, False, True, True]
    assert [len(c.toggles) for c in made] == [0, 1, 0, 1]
    assert len({c.key for c in made}) == 4


def test_a_model_may_have_an_adapter_of_its_own():
    models = "models=[tiny-llama,{tiny-llama@1x8: {r: 3, lora_dropout: 0.1}}]"
    one, _, two, _ = plan(config(models, "workload=2x16", "lora.lora_alpha=5", "ablations=[eager]"), "cpu").cells
    assert (one.model.name, one.model.lora.r) == ("tiny-llama", 16)
    assert (two.model.name, two.workload.name) == ("tiny-llama(r=3, lora_dropout=0.1)", "1x8")
    assert (two.model.lora.r, two.model.lora.lora_dropout, two.model.lora.lora_alpha) == (3, 0.1, 5)
    for wrong, says in (("{tiny-llama: {rank: 3}}", "rank"), ("{tiny-llama: 3}", "a model is a name")):
        with pytest.raises(ConfigError, match=says):
            plan(config(f"models=[{wrong}]"), "cpu")


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"ulysses": {"ranks": "two"}}, "ulysses: ranks: should be a valid integer, not 'two'"),
        ({"tensor_parallel": {"ranks": True}}, "tensor_parallel: ranks: should be a valid integer, not True"),
        ({"pipeline_1f1b": {"ranks": 0}}, "pipeline_1f1b: ranks: should be greater than 0, not 0"),
        ({"pipeline_gpipe": {"layers": 3}}, "pipeline_gpipe: layers: should be a valid array, not 3"),
        ({"fsdp2": {"reshard": "no"}}, "fsdp2: reshard: should be a valid boolean, not 'no'"),
        ({"fsdp2": {"replicas": 1.5}}, "fsdp2: replicas: should be a valid integer, not 1.5"),
        ({"deepspeed_zero": {"stage": True}}, "deepspeed_zero: stage: should be a valid integer, not True"),
        (
            {"pipeline_multi_adapter": {"flush": "x"}},
            "pipeline_multi_adapter: flush: should be a valid boolean, not 'x'",
        ),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_one_line_before_anything_starts(item, says):
    """These ran, as something else than was meant, or crashed in the worker (2026-11-28)."""
    with pytest.raises(NameUnknown) as refused:
        ablation(item)
    assert str(refused.value) == says


@pytest.mark.parametrize("item", [{"pipeline_gpipe": {"layers": [2, 1]}}, {"pipeline_gpipe": {"layers": None}}])
def test_a_list_is_a_tuple_and_nothing_is_none(item):
    assert ablation(item).layers == (tuple(item["pipeline_gpipe"]["layers"] or ()) or None)


def test_parameters_of_an_ablation_and_of_a_workload():
    made = cells("ablations=[{gradient_checkpointing:{use_reentrant:true}}]")
    assert made[1].toggles[0].label == "gradient_checkpointing(use_reentrant=True)"
    changed = workload({"gsm8k": {"samples": 4}})
    assert (changed.samples, changed.distribution, changed.name) == (4, "gsm8k", "gsm8k(samples=4)")


@pytest.mark.parametrize("name", names_in("suite"))
def test_every_suite_composes(name):
    made = plan(config(f"suite={name}"), "cuda").cells
    assert len({c.key for c in made}) == len(made) > 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("ablations=[pakcing]", "did you mean packing?"),
        ("models=[smollm2-135]", "did you mean smollm2-135m?"),
        ("modles=[a]", "did you mean models?"),
        ("suite=first_swep", "did you mean first_sweep?"),
        ("design=sollo", "did you mean solo?"),
        ("reference=peft_lo", "did you mean peft_low?"),
        ("reference=[peft,peft_lo]", "did you mean peft_low?"),
        ("workload=gsm8", "did you mean gsm8k?"),
        ("workload=4xabc", "(or BATCHxLENGTH as 4x2048, FILE.jsonl, FILE.yaml or ORG/DATASET)"),
        ("workload=.", "(or BATCHxLENGTH as 4x2048, FILE.jsonl, FILE.yaml or ORG/DATASET)"),
        ("ablations=[{torch_compile:{mod:x}}]", "did you mean mode?"),
        ("ablations=[{torch_compile:{mode:fastest}}]", "mode: should be 'default', 'reduce-overhead'"),
        ("ablations=[{padding_free:{size:3}}]", "padding_free has no parameters"),
        ("lora.r=0", "greater than or equal to 1"),
        ("lora.rank=8", "rank"),
        ("trials=0", "trials"),
        ("trials=many", "trials"),
        ("dtype=int8", "expected one of auto"),
        ("--trials=3", "without dashes"),
        ("models=[", "models="),
        ("trials", "expected trials=VALUE"),
        ("reference=[eager,sdpa]", "both fill the slot attention"),
        ("models=[no/such/file.yaml]", "no such file"),
        ("ablations=[eager,eager]", "stands twice"),
        ("design=ladder ablations=[eager]", "at least two"),
        ("workload={gsm8k:{distribution:gsm}}", "did you mean gsm8k?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(override, says, capsys, tmp_path):
    code = main([*override.split(" "), f"output={tmp_path}", "dry_run=true"])
    captured = capsys.readouterr()
    assert code == 2
    assert says in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("value", "shown"), [("", "''"), ("''", "''"), ("null", "None"), ("7", "7"), ("[a]", "['a']")])
@pytest.mark.parametrize("command", [main, recommend.main])
def test_an_output_that_names_no_folder_is_refused(value, shown, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command([f"output={value}", "models=[tiny-llama]", "dry_run=true"]) == 2
    assert capsys.readouterr().err == f"lorabench: output: expected a folder, not {shown}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_name_costs_no_folder(capsys, tmp_path):
    assert main(["ablations=[pakcing]", f"output={tmp_path / 'new'}"]) == 2
    assert "did you mean packing?" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_help_names_every_key_and_file(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in [*names_in("model"), *names_in("workloads"), *names_in("suite"), "resume=", "timeout_s=", "seed="]:
        assert word in text
    assert text.strip() == help_text().strip()


def test_a_reference_of_two_packages_registering_one_name_is_refused(monkeypatch):
    from importlib.metadata import EntryPoint

    from lorabench.plan import registry

    points = [EntryPoint("same", value, registry.GROUP) for value in ("a:A", "b:B")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry.registered.cache_clear()
    try:
        with pytest.raises(NameUnknown, match="two packages register"):
            registry.registered()
    finally:
        monkeypatch.undo()
        registry.registered.cache_clear()


def test_config_error_is_a_value_error():
    with pytest.raises(ConfigError):
        config("nothing=1")
