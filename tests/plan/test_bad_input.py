"""Whatever a user writes ends in a plan or in one line with exit code 2: no traceback, and no hang."""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import pytest
from helpers import sweep
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lorabench.contract.model import Lora
from lorabench.plan.compose import NOT_MEASURED, ConfigError, Plan, SweepConfig, load_config, names_in, plan
from lorabench.plan.registry import registered
from lorabench.plan.yaml_file import YamlError, read
from lorabench.sweep import main

TENFOLD = "\n".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10))
TEN_TIMES = "\n".join(["a0: xxxxxxxxxx", *(f"a{i}: {f'${{a{i - 1}}}' * 10}" for i in range(1, 10))])
TEN_BRANCHES = "\n".join(["a0: [x]", *(f"a{i}:{f'{chr(10)}- ${{a{i - 1}}}' * 10}" for i in range(1, 10))])
DECODER = "source: x\nconfig: {model_type: llama, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2"
MODEL_FILES = {
    "binary": (bytes(range(256)), "no text in UTF-8"),
    "malformed": ("a: [1, 2\nb: }", "it is no YAML"),
    "empty": ("", "expected a YAML mapping|config: it is missing"),
    "text": ("hello", "config: it is missing|expected a YAML mapping"),
    "alias_bomb": (f"a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n{TENFOLD}", "stands for more than"),
    "alias_of_itself": ("a: &a [*a]", "nested deeper"),
    "deep": (f"a: {'[' * 1500}{']' * 1500}", "nested deeper"),
    "deeper": (f"a: {'[' * 5000}{']' * 5000}", "nested deeper"),
    "large": (f"a: {'x' * 2_000_000}", "more than 1048576 bytes"),
    "an_object": ("!!python/object/apply:os.system [ls]", "it is no YAML"),
    "twice": (f"source: x\n{DECODER}}}", "duplicate key"),
    "interpolation": ("source: ${nowhere}", "Interpolation key 'nowhere' not found"),
    "interpolation_bomb": (TEN_TIMES, "stands for more than"),
    "interpolated_lists": (TEN_BRANCHES, "stands for more than"),
    "interpolation_of_itself": ("source: ${source}", "nested deeper"),
    "resolver": ("source: ${oc.select:a9}", "an interpolation of another form"),
    "long_family": (f"source: x\nconfig: {{model_type: {'x' * 100_000}}}", "did you mean|known"),
    "longer_family": (f"source: x\nconfig: {{model_type: {'x' * 1_000_000}}}", "did you mean|known"),
    "encoder": ("source: x\nconfig: {model_type: bert}", "is a bert, which is no decoder"),
    "family": ("source: x\nconfig: {model_type: lama}", "did you mean llama?"),
    "family_list": ("source: x\nconfig: {model_type: [llama]}", "expected a name such as llama"),
    "no_family": ("source: x\nconfig: {}", "config needs model_type"),
    "misspelt": (f"{DECODER}, num_hiden_layers: 3}}".replace("num_hidden_layers: 2, ", ""), "num_hidden_layers"),
    "unknown_field": (f"sauce: x\n{DECODER}}}", "did you mean source?"),
    "words": (f"{DECODER}, vocab_size: many}}", "words cannot be built by transformers"),
    "negative": (f"{DECODER}, vocab_size: -64}}", "negative"),
    "no_vocabulary": (f"{DECODER}, vocab_size: 0}}", "no_vocabulary"),
    "heads": (
        f"{DECODER}, num_attention_heads: 3}}",
        "hidden size (64) is not a multiple of the number of attention heads",
    ),
    "layers": ("source: x\nconfig: {model_type: qwen2, num_hidden_layers: 1000000000}", "expected at most 2048"),
    "no_layers": ("source: x\nconfig: {model_type: llama, num_hidden_layers: 0}", "num_hidden_layers 0"),
    "null_layers": ("source: x\nconfig: {model_type: llama, num_hidden_layers: null}", "num_hidden_layers None"),
}
LARGEST = ("deep", "deeper", "longer_family")  # of which PyYAML alone takes seconds; an alias of itself is as deep
FIXED = "kind: fixed\nbatch_size: 1\nseq_len: 8\n"
WORKLOAD_FILES = {
    "binary": (bytes(range(256)), "no text in UTF-8"),
    "alias_bomb": (f"a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n{TENFOLD}", "stands for more than"),
    "no_kind": ("batch_size: 1", "no_kind: kind: it is missing"),
    "nothing": ("kind: fixed\nbatch_size: 0\nseq_len: 8", "greater than or equal to 1"),
    "too_much": ("kind: fixed\nbatch_size: 100000\nseq_len: 100000", "expected at most 67108864 in a step"),
    "no_text": ("kind: text\nbatch_size: 1\nseq_len: 8\npath: ./nowhere\ntokenizer: x/y", "nowhere: no such file"),
    "optimizer": (f"{FIXED}jobs: [{{name: a, optimizer: adamww}}]", "did you mean adamw?"),
    "adapter": (f"{FIXED}jobs: [{{name: a, lora: {{target_modules: [q_prj]}}}}]", "did you mean q_proj?"),
}
LINES = {
    "suite=null": "no suite named 'null'", "suite=": "no suite named ''", "suite=../model": "no suite named",
    "dtype=bf16": "did you mean bfloat16?", "dtype=fp16": "did you mean float16?", "dtype=[a]": "dtype",
    "foo.yaml": "'foo.yaml' is not understood: expected key=value, as in models=foo.yaml",
    "lora.rank=8": "no key named 'rank' in lora; did you mean r?", "+lora.rank=8": "did you mean r?",
    "lora.lora_bias=true": "PEFT's lora_bias is not measured; expected of lora: r, lora_alpha, lora_dropout",
    "models=[{tiny-llama:{lora_bias:true}}]": "PEFT's lora_bias is not measured", "lora.use_rslor=1": "use_rslora?",
    "lora.dropout=0.1": "did you mean lora_dropout?", "lora=5": "lora", "~lora": "lora", "lora.r=null": "lora.r",
    "lora.lora_alpha=nan": "finite", "lora.lora_dropout=nan": "lora_dropout",
    "lora.target_modules=[q_prj]": "no module named 'q_prj' in the model tiny-llama for lora.target_modules; "
    "did you mean q_proj?",
    "lora.target_modules=[q_proj,gate]": "did you mean gate_proj?", "lora.target_modules=[]": "is empty",
    "lora.target_modules='.*nope'": "no module named '.*nope'", "lora.target_modules='[('": "no regular expression",
    "lora.target_modules=[input_layernorm]": "a LlamaRMSNorm; expected a linear",
    "models=[{tiny-llama:{target_modules:[x]}}]": "no module named 'x'",
    "models=['tiny-llama@']": "is no model; expected KIND:MODEL@WORKLOAD", "models=[':tiny-llama']": "is no model",
    "models=nope": "no model named 'nope'; known:", "models=tiny-lama": "did you mean tiny-llama?",
    "models=[{tiny-llama:{rank:3}}]": "did you mean r?", "models=[null]": "a model is a name",
    "models=[nope:tiny-llama]": "no kind named 'nope'", "models=[]": "expected at least one",
    "weights=randm": "did you mean random?", "weights=a/b/c": "expected random, a hub name", "weights=": "expected",
    "weights=./nowhere": "no such folder", "weights=smollm2-135m-instruct": "hidden_size 576, the model tiny-llama has",
    "timeout_s=.inf": "timeout_s", "timeout_s=nan": "finite", "trials=1e9": "100000", "seed=-1": "seed",
    "seed=99999999999999999999": "seed", "world_size=99999": "1024",
    "workload=0x8": "batch_size", "workload=9999999x9999999": "expected at most 67108864",
    "workload={gsm8k:{sample:1}}": "did you mean samples?", "workload=[a]": "workload",
    "ablations=[{1:{}}]": "an ablation is a name", "ablations=[{eager:5}]": "an ablation is a name",

    "ablations=nope": "no ablation named", "reference=5": "reference", "baselines.peft=5": "baselines.peft",
    "own_ablations=5": "own_ablations", "design=null": "design", "queue=nope": "queue",
    "resume=maybe": "resume: should be True, False or 'failed', not 'maybe'",
    "trials=${nope}": "nope", "trials=\udcff": "expected text in UTF-8", "trials=\0": "expected text in UTF-8",
    "models=[\udcff.yaml]": "expected text in UTF-8", "hydra.run.dir=x": "no key named 'hydra'", "=": "no key named",
    f"models={'[' * 300}{']' * 300}": "nested deeper", f"models={'{a:' * 40}1{'}' * 40}": "nested deeper",
    f"part={'a' * 5000}": "is no part; expected one of several", f"dtype={'a' * 5000}": "did you mean|expected one of",
    f"models=[{'a' * 5000}]": "no model named 'aaa",
    f"trials={'(' * 500}": "nested deeper", f"trials={'9' * 5000}": "not understood", f"x={'a' * 30000}": "longer",
}  # fmt: skip


def nothing_but_planning(out: str) -> bool:
    """Whether the sweep said at most what it began with: the complaint is all that comes of it."""
    return out in ("", f"lorabench {version('lorabench')}: planning …\n")


def complaint(capsys, *overrides: str) -> str:
    """The one line that a bad command ends in, found within seconds."""
    began = time.monotonic()
    code = main([*overrides, "dry_run=true"])
    said = capsys.readouterr()
    assert code == 2, said
    (line,) = said.err.splitlines()
    assert line.startswith("lorabench: ") and len(line) < 900 and nothing_but_planning(said.out)
    assert time.monotonic() - began < 30
    return line


def says(line: str, words: str) -> bool:
    return any(word in line for word in words.split("|"))


@pytest.mark.parametrize("override", LINES)
def test_a_bad_override_is_one_line(override, capsys):
    line = complaint(capsys, "models=[tiny-llama]", override)
    assert says(line, LINES[override]), line


@pytest.mark.parametrize(
    ("key", "name"),
    [pytest.param("models", n, marks=[pytest.mark.exhaustive] if n in LARGEST else []) for n in MODEL_FILES]
    + [("workload", n) for n in WORKLOAD_FILES],
)
def test_a_bad_yaml_file_is_one_line(key, name, tmp_path, capsys):
    content, words = (MODEL_FILES if key == "models" else WORKLOAD_FILES)[name]
    path = tmp_path / f"{name}.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = complaint(capsys, "models=[tiny-llama]", f"{key}={path}")
    assert says(line, words), line


@pytest.mark.parametrize("arguments", [["suite=null"], ["models=[a"], ["dtype=bf16", "models=tiny-llama"]])
def test_a_process_ends_with_code_2_and_one_line(arguments, tmp_path):
    done = sweep(*arguments, f"output={tmp_path / 'new'}", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and nothing_but_planning(done.stdout)
    assert not (tmp_path / "new").exists()


def test_what_is_said_not_to_be_measured_is_peft_s():
    from peft import LoraConfig

    assert set(LoraConfig.__dataclass_fields__) - set(Lora.model_fields) >= NOT_MEASURED


def test_a_single_name_is_a_list_of_one():
    made = plan(load_config(["models=tiny-llama", "workload=2x16", "ablations=eager"]), "cpu")
    assert [[t.name for t in c.toggles] for c in made.cells] == [[], ["eager"]]


def test_anchors_of_an_honest_file_are_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: 1.0e-5, y: 1e-5}\nb: [*a, *a]\nc: ${a.x}\n")
    assert read(path) == {"a": {"x": 1e-5, "y": 1e-5}, "b": [{"x": 1e-5, "y": 1e-5}] * 2, "c": 1e-5}
    path.write_text("a: ${a}\n")
    with pytest.raises(YamlError):
        read(path)


WORDS = st.one_of(
    st.sampled_from([*names_in("model")[-5:], *names_in("workloads"), *names_in("suite"), *sorted(registered())]),
    st.sampled_from(["peft", "ladder", "2x16", "linear-8x8", "q_proj", "r", "null", "random", "auto", "train", ""]),
    st.integers(-3, 70).map(str), st.floats().map(str), st.text(max_size=6),
)  # fmt: skip
VALUES = st.recursive(
    WORDS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda x: f"[{','.join(x)}]"),
        st.dictionaries(WORDS, inner, max_size=2).map(lambda x: "{" + ",".join(f"{k}:{v}" for k, v in x.items()) + "}"),
    ),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [*SweepConfig.model_fields, "suite", "lora.r", "lora.target_modules", "lora.bias", "own_ablations.train", "nope"]
)
OVERRIDES = st.builds("{}{}={}".format, st.sampled_from(["", "", "", "+", "++", "~"]), KEYS, VALUES)


@pytest.mark.parametrize("examples", [20, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_any_configuration_is_a_plan_or_one_line(examples):
    drawn = given(overrides=st.lists(OVERRIDES, min_size=1, max_size=3))(is_a_plan_or_one_line)
    known = example(overrides=["models=tiny-gemma", "design="])(drawn)
    settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))(known)()


def is_a_plan_or_one_line(overrides):
    try:
        made = plan(load_config(["models=[tiny-llama]", *overrides]), "cpu")
    except ConfigError as error:
        assert str(error).strip()
    else:
        assert isinstance(made, Plan) and len({cell.key for cell in made.cells}) >= 1


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.one_of(st.binary(max_size=200), st.text("[]{}:,-&*!|>'\"#%@`a1 \n", max_size=60).map(str.encode)))
def test_any_file_is_read_or_refused(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    try:
        read(path)
    except YamlError as error:
        assert str(error).strip() and sys.getrecursionlimit()


@pytest.mark.parametrize("key", ["content", "messages"])
def test_a_row_s_long_words_are_cut_in_the_middle(key, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    row = {"x" * 1_000_000: 1} if key == "content" else {"messages": [{"role": "u" * 1_000_000, "content": "x"}]}
    path.write_text(json.dumps(row) + "\n")
    assert main(["models=[tiny-llama]", f"workload={path}", "dry_run=true"]) == 2
    line = capsys.readouterr().err
    assert len(line) < 2100 and "expected" in line.partition(" … ")[2]
