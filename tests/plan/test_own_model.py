"""A user's own model: a folder, a config.json, a hub name, of any family; and one line for what is none."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import config
from own_models import FAMILIES, LLAMA, chats, saved
from safetensors.torch import load_file, save_file

from lorabench.contract.model import Lora
from lorabench.measure import flops
from lorabench.plan import architecture, hub
from lorabench.plan.compose import ConfigError, model, plan
from lorabench.plan.weights import SINGLE
from lorabench.sweep import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("own") / "mine")


@pytest.fixture
def copied(folder, tmp_path):
    """The folder, to be changed."""
    target = tmp_path / "copied"
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def planned(*overrides: str):
    return plan(config("workload=2x16", "ablations=[eager]", *overrides), "cpu").cells


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        planned(*overrides)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def configured(folder, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_folder_and_its_config_json_are_one_model(folder):
    one, other = (model(str(name), config()) for name in (folder, folder / "config.json"))
    assert one == other
    assert (one.name, one.family, one.weights, one.location) == ("mine", "llama", "random", str(folder))
    assert one.lora.target_modules == "all-linear"
    assert model(str(folder), config("weights=auto")).weights == str(folder)
    assert model("tiny-llama", config("weights=auto")).weights == "random"
    assert model("tiny-llama", config()).lora == Lora(), "a named model keeps its adapter"


def test_a_folder_may_have_a_workload_an_adapter_and_a_kind_of_its_own(folder):
    (one, *_), (two, *_) = planned(f"models=[{folder}@4x9]"), planned(f"models=[{{{folder}: {{r: 3}}}}]")
    assert (one.workload.name, one.model.name) == ("4x9", "mine")
    assert (two.workload.name, two.model.name, two.model.lora.r) == ("2x16", "mine(r=3)", 3)
    assert planned(f"models=[evaluate:{folder}]", "ablations=[no_kv_cache]")[0].kind == "evaluate"
    assert planned(f"models=[{{{folder}: {{target_modules: [q_proj]}}}}]")[0].model.lora.target_modules == ["q_proj"]


def test_a_folder_s_name_may_have_colons_and_ats(folder, tmp_path):
    odd = tmp_path / "run:3@home"
    odd.symlink_to(folder)
    assert planned(f"models=['{odd}']")[0].model.family == "llama"


def test_two_folders_of_one_name_are_told_apart(folder, tmp_path):
    other = tmp_path / "mine"
    other.symlink_to(folder)
    saved(tmp_path / "b" / "mine")
    names = {c.model.name for c in planned(f"models=[{folder},{tmp_path / 'b' / 'mine'}]")}
    assert names == {str(folder), str(tmp_path / "b" / "mine")}


def test_other_content_under_the_same_name_is_another_measurement(copied):
    def key(*overrides):
        return planned(f"models=[{copied}]", *overrides)[1].key

    random, own = key(), key("weights=auto")
    assert random != own and (random, own) == (key(), key("weights=auto"))
    tensors = load_file(copied / SINGLE)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}, copied / SINGLE, {"format": "pt"})
    assert key() == random, "random weights are not the folder's"
    assert key("weights=auto") != own
    configured(copied, rope_theta=5e5)
    assert key() != random


@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_is_cut_for_the_gate_and_its_linears_are_counted(family, tmp_path):
    path = tmp_path / family / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": family, **FAMILIES[family]}))
    spec = planned(f"models=[{path}]")[0].model
    whole, shallow = architecture.skeleton(spec), architecture.skeleton(spec, layers=2)
    assert (len(architecture.decoder_layers(whole)), len(architecture.decoder_layers(shallow))) == (3, 2)
    shape = flops.decoder(spec, spec.lora)
    assert shape.frozen > 0 and shape.attention == 3 * 32 and shape.head == 320 * 32
    dropouts = {k: v for k, v in vars(spec.hf_config()).items() if "drop" in k and isinstance(v, float)}
    assert not any(dropouts.values()), "two arms could not be compared under the model's own dropout"


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_go_where_peft_s_all_linear_puts_them(family, tmp_path):
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    ours = {id(module) for module in architecture.adapted(made, "all-linear")}
    on = get_peft_model(made, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    linears = [m.base_layer for m in on.modules() if isinstance(m, LoraLayer) and not isinstance(m, ParamWrapper)]
    assert ours == {id(module) for module in linears} and ours


def test_of_a_mixture_only_the_chosen_experts_are_counted(tmp_path):
    def frozen(chosen):
        path = tmp_path / f"{chosen}.json"
        path.write_text(json.dumps({"model_type": "mixtral", **FAMILIES["mixtral"], "num_experts_per_tok": chosen}))
        return flops.decoder(model(str(path), config()), Lora()).frozen

    one_expert = 3 * 32 * 48 * 3  # gate, up and down of three layers
    assert frozen(2) - frozen(1) == frozen(4) - frozen(3) == one_expert


def test_of_a_model_of_several_parts_the_decoder_is_taken(tmp_path):
    text = {"model_type": "gemma3_text", **FAMILIES["gemma"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "vision_config": {}, "text_config": text}))
    assert planned(f"models=[{path}]")[0].model.family == "gemma3_text"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "cannot be read"), ("[]", "expected one JSON object"), ("{}", "config needs model_type"),
        ('{"model_type": "lama"}', "did you mean llama?"),
        ('{"model_type": "own", "auto_map": {}}', "code of its own, which is not run"),
        ('{"model_type": "bert"}', "is a bert, which is no decoder"),
        ('{"model_type": "pegasus"}', "is a pegasus, which is no decoder"),
        ('{"model_type": "llama", "num_hidden_layers": 99999}', "at most 2048"),
        (json.dumps({"model_type": "llama", **LLAMA, "quantization_config": {"quant_method": "gptq"}}), "weights=auto"),
    ],
)  # fmt: skip
def test_a_config_json_that_is_none_is_one_line(content, says, tmp_path):
    (tmp_path / "config.json").write_text(content)
    assert says in refused(f"models=[{tmp_path}]")


def test_a_folder_that_is_no_model_is_one_line(folder, tmp_path):
    assert "no config.json in the folder" in refused(f"models=[{tmp_path}]")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    assert "a PEFT adapter and no model; expected the model that it is for: some/b" in refused(f"models=[{tmp_path}]")
    assert "no such folder" in refused("models=[./nowhere]")
    assert "no such file" in refused("models=[nowhere/config.json]")
    assert "no model named 'nope'; known:" in refused("models=[nope]") and "ORG/NAME" in refused("models=[nope]")
    assert "did you mean q_proj?" in refused(f"models=[{folder}]", "lora.target_modules=[q_prj]")
    other = saved(tmp_path / "gpt2", "gpt2")
    assert "did you mean c_proj?" in refused(f"models=[{other}]", "lora.target_modules=[o_proj]")


def test_weights_that_are_not_the_folder_s_own_are_one_line(copied):
    tensors = load_file(copied / SINGLE)
    save_file({**tensors, "model.norm.weight": torch.ones(8)}, copied / SINGLE, {"format": "pt"})
    assert "model.norm.weight has the shape [8]" in refused(f"models=[{copied}]", "weights=auto")
    (copied / SINGLE).unlink()
    assert "weights=random needs none" in refused(f"models=[{copied}]", "weights=auto")
    assert planned(f"models=[{copied}]")


def test_a_step_longer_than_a_model_s_positions_is_one_line(folder):
    assert "expected seq_len of at most 256" in refused(f"models=[{folder}]", "workload=1x300")
    assert planned(f"models=[{folder}]", "workload=1x256")


class TestHub:
    """The hub is asked for its files by one function, which is replaced here: no test goes into a network."""

    @pytest.fixture(autouse=True)
    def _no_network(self, monkeypatch):
        hub.answered.cache_clear()
        monkeypatch.setattr("huggingface_hub.HfApi.repo_info", self.unreachable)
        yield
        hub.answered.cache_clear()

    @staticmethod
    def unreachable(*_args, **_kwargs):
        raise ConnectionError("no route to host")

    @staticmethod
    def raising(name):
        from huggingface_hub import errors

        def raises(*_args, **_kwargs):
            raise getattr(errors, name)("no", response=SimpleNamespace(headers={}, request=None))

        return raises

    def test_a_name_on_the_hub_is_a_model(self, folder, monkeypatch):
        monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(folder / file))
        spec = model("org/name", config("weights=auto"))
        assert (spec.name, spec.family, spec.weights) == ("org/name", "llama", "org/name")
        assert planned("models=[org/name@1x8]")[0].workload.name == "1x8"

    def test_no_network_and_no_such_repository_are_one_line(self, monkeypatch):
        assert "org/name is no folder here, and the hub cannot be reached" in refused("models=[org/name]")
        hub.answered.cache_clear()
        monkeypatch.setattr("huggingface_hub.HfApi.repo_info", self.raising("RepositoryNotFoundError"))
        assert "the hub has no model org/name, or none that you may see" in refused("models=[org/name]")

    def test_weights_on_the_hub_are_judged_by_their_configuration(self, folder, monkeypatch):
        assert "the hub cannot be reached" in refused("models=[tiny-llama]", "weights=org/name")
        monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(folder / file))
        assert "have hidden_size 32, the model tiny-llama has 64" in refused("models=[tiny-llama]", "weights=org/name")
        assert planned(f"models=[{folder}]", "weights=org/name")[0].model.weights == "org/name"

    def test_a_gated_repository_and_one_without_a_model_are_one_line(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_args, **_kwargs: None)
        answers = {
            "GatedRepoError": "is gated: ask", "RemoteEntryNotFoundError": "has no config.json",
            "HfHubHTTPError": "config.json cannot be downloaded: no",
        }  # fmt: skip
        for error, says in answers.items():
            monkeypatch.setattr("huggingface_hub.hf_hub_download", self.raising(error))
            assert says in refused("models=[org/name]")

    def test_the_offline_switch_is_left_as_it_was(self):
        from huggingface_hub import constants

        before = constants.HF_HUB_OFFLINE
        with hub.connected("org/name") as answers:
            assert not answers and constants.HF_HUB_OFFLINE
        assert before == constants.HF_HUB_OFFLINE


def test_dry_run_says_the_same(folder, tmp_path, capsys):
    text = chats(tmp_path / "chats.jsonl")
    arguments = [f"models=[{folder}]", f"workload={text}", "ablations=[eager]", "dry_run=true"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "mine @" in said and "rows, chosen by their length; padding" in said
    assert main([*arguments, "models=[./nowhere]"]) == 2
    assert main([*arguments, f"workload={tmp_path / 'nowhere.jsonl'}"]) == 2
    assert "nowhere.jsonl: no such file" in capsys.readouterr().err.splitlines()[1]
