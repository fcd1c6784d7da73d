"""A user's own text: a JSONL file or a hub data set, what is found in it, and one line for what is wrong with it."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from helpers import config
from own_models import CHATS, chats, jsonl, messages, saved, tokenizer

from lorabench.contract.batch import IGNORE
from lorabench.contract.cell import Cell
from lorabench.plan import hub, rows
from lorabench.plan.compose import ConfigError, plan
from lorabench.plan.samples import draw


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("own") / "mine")


@pytest.fixture
def cell(folder, tmp_path):
    """The first cell of a sweep of the model over a file with these rows, or of a text as it is."""

    def made(content, device: str = "cpu", name: str = "a.jsonl", **changes) -> Cell:
        path = tmp_path / name
        path.write_text(content) if isinstance(content, str) else jsonl(path, content)
        item = f"{{{path}: {json.dumps(changes).replace(chr(34), '')}}}" if changes else str(path)
        return plan(config(f"models=[{folder}]", f"workload={item}", "ablations=[eager]"), device).cells[0]

    return made


def trained(cell: Cell) -> list[str]:
    """What is trained on in each of the samples, as text."""
    made = tokenizer()
    drawn = draw(cell.workload, 320, 0)
    return sorted(made.decode([t for t in s.labels if t != IGNORE]) for s in drawn)


def test_chats_are_trained_on_what_the_assistant_says(cell):
    made = cell([{"messages": messages(chat)} for chat in CHATS], samples=4)
    assert trained(made) == [
        "3 * 4 = 12.<|im_end|>\nYou are welcome.<|im_end|>\n", "Hola.<|im_end|>\n",
        "The Seine.<|im_end|>\nThe Nile.<|im_end|>\n", "Twelve.<|im_end|>\n",
    ]  # fmt: skip
    assert (made.workload.format, made.workload.fields) == ("messages", ["messages"])
    assert made.workload.tokenizer == made.model.location


def test_what_is_found_in_the_rows_decides(cell):
    both = [{"prompt": "3 * 4 =", "completion": " 12"}] * 2
    assert trained(cell(both)) == [" 12<|im_end|>"] * 2
    whole = cell(both, train_on="all")
    assert trained(whole) == ["3 * 4 = 12<|im_end|>"] * 2 and whole.workload.format == "prompt_completion"
    assert trained(cell([{"text": "Twelve."}] * 2)) == ["Twelve.<|im_end|>"] * 2
    two = cell([{"q": "3 * 4?", "a": "12"}] * 2, fields=["q", "a"])
    assert trained(two) == ["12\n<|im_end|>"] * 2 and two.workload.format is None
    other = cell([{"chat": messages(CHATS[0])}] * 2, fields=["chat"])
    assert trained(other) == ["Twelve.<|im_end|>\n"] * 2 and other.workload.format == "messages"


def test_a_prompt_and_its_completion_may_be_lists_of_turns(cell):
    _, brief, two, _ = (messages(chat) for chat in CHATS)
    split = [{"prompt": brief[:2], "completion": brief[2:3]}, {"prompt": two[:3], "completion": two[3:]}]
    made, says = cell(split), ["The Seine.<|im_end|>\n", "You are welcome.<|im_end|>\n"]
    assert trained(made) == says
    assert (made.workload.format, made.workload.fields) == ("prompt_completion", ["prompt", "completion"])
    named = cell([{"ask": row["prompt"], "say": row["completion"]} for row in split], fields=["ask", "say"])
    assert trained(named) == says
    mixed = cell([split[0], {"prompt": "3 * 4 =", "completion": " 12"}])
    assert trained(mixed) == [" 12<|im_end|>", "The Seine.<|im_end|>\n"]


def test_a_step_has_no_more_rows_than_the_file(cell):
    few = cell([{"text": "Twelve."}] * 3, device="cuda").workload
    assert (few.samples, few.batch_size) == (3, 3)
    many = cell([{"text": "Twelve."}] * 50, device="cuda").workload
    assert (many.samples, many.batch_size, many.name) == (16, 4, "a.jsonl")
    assert cell([{"text": "Twelve."}] * 50).workload.samples == 2


def test_a_row_without_anything_to_train_on_is_passed_over(cell):
    long = {"prompt": "many words " * 20, "completion": "x"}
    made = cell([long, {"prompt": "a", "completion": "b"}, long, {"prompt": "c", "completion": "d"}], seq_len=9)
    assert trained(made) == ["b<|im_end|>", "d<|im_end|>"]


NOTHING_SAID = {"messages": messages([("user", "Hello?")])}


def test_a_step_has_all_rows_that_can_be_trained_where_nobody_asked_for_more(cell):
    some = [NOTHING_SAID, {"messages": messages(CHATS[0])}, NOTHING_SAID]
    made = cell(some)
    assert trained(made) == ["Twelve.<|im_end|>\n"] and (made.workload.samples, made.workload.batch_size) == (1, 1)
    both = cell([*some, {"messages": messages(CHATS[3])}], device="cuda", batch_size=3).workload
    assert (both.samples, both.batch_size) == (2, 3), "a batch_size that was asked for stays"
    with pytest.raises(ConfigError, match=r"only 1 of 3 rows have anything to train on .*; the workload needs 2$"):
        cell(some, samples=2)
    with pytest.raises(
        ConfigError, match=r"none of the 2 rows have anything .* the roles user; .*; the workload needs 1$"
    ):
        cell([NOTHING_SAID] * 2)


def test_rows_are_as_long_as_the_model_has_positions_for_where_nobody_asked_for_more(cell, tmp_path):
    long = [{"text": "eggs " * 600}] * 2
    assert cell(long).workload.seq_len == 256 and len(trained(cell(long))) == 2
    assert cell(long, seq_len=100).workload.seq_len == 100
    with pytest.raises(
        ConfigError, match=r"has positions for 256 .*; expected \{FILE.jsonl: \{seq_len: 256\}\} or less"
    ):
        cell(long, seq_len=257)
    roomy = saved(tmp_path / "roomy", max_position_embeddings=4096)
    made = plan(config(f"models=[{roomy}]", f"workload={jsonl(tmp_path / 'b.jsonl', long)}", "ablations=[]"), "cpu")
    assert made.cells[0].workload.seq_len == 2048


def test_other_content_is_another_measurement(cell, tmp_path):
    content = [{"text": "Twelve."}] * 4
    one = cell(content).key
    assert one == cell(content).key
    assert one != cell([*content[:3], {"text": "Eleven."}]).key
    assert one != cell(content, seq_len=100).key


def test_another_chat_template_is_another_measurement(tmp_path):
    text, keys = chats(tmp_path / "chats.jsonl"), []
    for template in ("{{ bos_token }}", ""):
        template += "{% for m in messages %}{{ m['role'] + ':' + m['content'] + eos_token }}{% endfor %}"
        folder = saved(tmp_path / f"{len(keys)}" / "mine", template=template)
        made = plan(config(f"models=[{folder}]", f"workload={text}", "ablations=[eager]"), "cpu").cells[0]
        keys.append(made.workload.fingerprint)
    assert keys[0] != keys[1]


def test_jobs_have_text_of_their_own(folder, tmp_path):
    text = chats(tmp_path / "chats.jsonl")
    path = tmp_path / "two.yaml"
    path.write_text(
        f"kind: text\nbatch_size: 1\nseq_len: 64\npath: {text}\nfields: []\ntrain_on: last_field\njobs:\n"
        f"- {{name: a}}\n- {{name: b, workload: {{path: {jsonl(tmp_path / 'b.jsonl', [{'text': 'x y'}])}}}}}\n"
    )
    made = plan(config(f"models=[{folder}]", f"workload={path}", "ablations=[eager]"), "cpu").cells[0]
    assert [job.workload.format for job in made.jobs] == ["messages", "text"]
    assert len({job.workload.fingerprint for job in made.jobs}) == 2


GOOD = '{"text": "x"}\n'
WRONG = {
    "field": ('{"message": "x"}\n', {}, "line 1 has the fields message; did you mean messages?"),
    "fields": ('{"q": "x", "a": "y"}\n', {}, "has the fields q, a; expected messages, prompt and completion"),
    "later": (f'{GOOD}\n{{"txt": "x"}}\n', {}, "no field named 'text' in {path} line 3; did you mean txt?"),
    "json": (f"{GOOD}text\n", {}, "{path} line 2 is not JSON; expected one object a line"),
    "array": ('["x"]\n', {}, "line 1 is a list; expected one JSON object a line"),
    "nothing": ("\n", {}, "has no rows"),
    "number": ('{"messages": 5}\n', {}, "messages is a number; expected a list of messages"),
    "no_messages": ('{"messages": []}\n', {}, "messages is an empty list"),
    "strings": ('{"messages": ["x"]}\n', {}, "message 1 is text; expected an object with role, content"),
    "number_as_text": (f'{GOOD}{{"text": 3}}\n', {}, "{path} line 2: text is a number; expected text"),
    "truth_as_text": ('{"text": true}\n', {}, "line 1: text is a bool; expected text"),
    "half_a_chat": ('{"prompt": [{"role": "user", "content": "x"}], "completion": "y"}\n', {}, "completion is text"),
    "other_half": ('{"prompt": "x", "completion": [{"role": "assistant", "content": "y"}]}\n', {}, "completion is a l"),
    "sharegpt": (
        '{"conversations": [{"from": "human", "value": "y"}]}\n', {},
        "line 1 has the fields conversations; these are ShareGPT's: rename conversations to messages, and in its turns "
        "rename from to role (human to user, gpt to assistant) and value to content",
    ),
    "turns": ('{"messages": [{"from": "x", "value": "y"}]}\n', {}, "expected role and content: rename"),
    "unnamed": ('{"chat": [{"role": "user", "content": "y"}]}\n', {}, "holds the chat: {FILE.jsonl: {fields: [chat]}}"),
    "alpaca": (
        '{"instruction": "x", "input": "", "output": "y"}\n', {},
        "these are Alpaca's: name them: {FILE.jsonl: {fields: [instruction, input, output]}}",
    ),
    "null": ('{"prompt": "x", "completion": null}\n', {}, "line 1: completion is null; expected text"),
    "nobody": ('{"messages": [{"role": "user", "content": "y"}]}\n', {}, "the first has the roles user; trained"),
    "role": ('{"messages": [{"role": "usr", "content": "y"}]}\n', {}, "has the role 'usr'; did you mean user?"),
    "role_gpt": ('{"messages": [{"role": "gpt", "content": "y"}]}\n', {}, "did you mean assistant?"),
    "role_x": ('{"messages": [{"role": "x", "content": "y"}]}\n', {}, "'x'; expected one of system, developer, user"),
    "role_in_a_part": ('{"prompt": [{"role": "usr", "content": "y"}], "completion": []}\n', {}, "did you mean user?"),
    "length": (GOOD * 2, {"seq_len": 2, "samples": 3}, "has 2 rows; the workload needs 3"),
    "named": (GOOD, {"fields": ["txt"]}, "no field named 'txt' in {path} line 1; did you mean text?"),
    "no_samples": (GOOD, {"samples": 0}, "samples: of a text expected 1 or more"),
    "key": (GOOD, {"lenght": 3}, "no field named 'lenght'"),
    "tokenizer": (GOOD, {"tokenizer": "./nowhere"}, "no such folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line_with_the_file_and_the_line(name, cell, tmp_path):
    content, changes, says = WRONG[name]
    with pytest.raises(ConfigError) as raised:
        cell(content, **changes)
    assert says.replace("{path}", str(tmp_path / "a.jsonl")) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_suffix_may_be_in_capitals(cell):
    assert cell([{"text": "Twelve."}] * 2, name="A.JSONL").workload.name == "A.JSONL"


def test_a_file_in_another_encoding_is_one_line(folder, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes((GOOD + '{"text": "café"}\n').encode("latin-1"))
    with pytest.raises(ConfigError, match=r"a\.jsonl line 2 is not UTF-8; expected JSON lines in UTF-8"):
        plan(config(f"models=[{folder}]", f"workload={path}", "ablations=[eager]"), "cpu")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("workload=nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("workload=data.csv", "whose name ends with .jsonl"),
        ("workload=data.CSV", "whose name ends with .jsonl"),
        ("workload=chats", "no workload named 'chats'"),
        ("models=[tiny-llama]", "the model tiny-llama has no tokenizer"),
        ("models=[linear-8x8] reference=linear ablations=[lora_addmm]", "has text, which linear-8x8 cannot read"),
    ],
)
def test_a_wrong_workload_or_model_for_it_is_one_line(override, says, folder, tmp_path):
    text = chats(tmp_path / "chats.jsonl")
    with pytest.raises(ConfigError, match=says):
        plan(config(f"models=[{folder}]", f"workload={text}", *override.split()), "cpu")


def test_a_folder_in_place_of_a_file_is_one_line(folder, tmp_path):
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"dir\.jsonl is a folder; expected a file of JSON lines with messages"):
        plan(config(f"models=[{folder}]", f"workload={tmp_path / 'dir.jsonl'}"), "cpu")


def test_a_folder_without_a_tokenizer_is_one_line(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="no tokenizer in"):
        plan(config(f"models=[{tmp_path}]", f"workload={chats(tmp_path / 'chats.jsonl')}"), "cpu")


class TestDataSet:
    """`workload=ORG/DATASET`, by the package datasets; no test goes into a network."""

    @pytest.fixture(autouse=True)
    def _no_network(self, monkeypatch):
        def unreachable(*_args, **_kwargs):
            raise ConnectionError("no route to host")

        for kept in (hub.answered, rows._data_set):
            kept.cache_clear()
        monkeypatch.setattr("huggingface_hub.HfApi.repo_info", unreachable)
        yield
        for kept in (hub.answered, rows._data_set):
            kept.cache_clear()

    def test_its_rows_are_read(self, folder, monkeypatch):
        table = [{"prompt": "3 * 4 =", "completion": " 12"}] * 20
        asked = []

        def load_dataset(*names, **kwargs):
            asked.append((names, kwargs))
            return table

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        item = "{org/data: {subset: main, split: test}}"
        made = plan(config(f"models=[{folder}]", f"workload={item}", "ablations=[eager]"), "cpu").cells[0]
        assert asked == [(("org/data", "main"), {"split": "test"})]
        assert trained(made) == [" 12<|im_end|>"] * 2
        assert made.workload.name == "org/data(subset=main, split=test)"

    @pytest.mark.parametrize("installed", [True, False])
    def test_what_cannot_be_had_is_one_line(self, installed, folder, monkeypatch):
        if not installed:
            monkeypatch.setitem(sys.modules, "datasets", None)
        says = "the hub cannot be reached" if installed else r"pip install 'lorabench\[data\]'"
        with pytest.raises(ConfigError, match=says):
            plan(config(f"models=[{folder}]", "workload=org/data"), "cpu")
