"""A wrong entry in the file of `lorabench jobs` is one line, said before torch is there and before anything begins."""

from __future__ import annotations

import subprocess
import sys

import own_models
import pytest
import yaml

from lorabench.plan.jobs_file import JobsFileError, read, ways

HEAVY = ("torch", "peft", "transformers", "lorakernels", "pandas", "matplotlib")
JOB = {"name": "one", "batch_size": 2}


@pytest.fixture
def written(tmp_path):
    own_models.jsonl(tmp_path / "a.jsonl", [{"prompt": "How much?", "completion": "Two."}] * 3)
    own_models.jsonl(tmp_path / "alpaca.jsonl", [{"instruction": "Say", "input": "", "output": "it"}])

    def write(*changes, **keys):
        jobs = [JOB | {"data": str(tmp_path / "a.jsonl")} | change for change in changes or ({},)]
        path = tmp_path / "jobs.yaml"
        path.write_text(yaml.safe_dump({"model": "tiny-llama", "weights": "random"} | keys | {"jobs": jobs}))
        return path

    return write


def test_a_file_that_is_right(written):
    found = read(written({"early_stop": {}}), {"output": "elsewhere"})
    assert (found.jobs[0].batch_size, str(found.output), found.way) == (2, "elsewhere", "auto")
    assert found.jobs[0].early_stop is not None and found.adapted(found.jobs[0]).lora.r == 16


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 0}, "job one: batch_size: should be greater than or equal to 1, not 0"),
        ({"batchsize": 2}, "job one: no key named 'batchsize'; did you mean batch_size?"),
        ({"learning_rate": "fast"}, "job one: learning_rate: should be a valid number"),
        ({"schedule": "cosin"}, "job one: schedule: should be 'constant', 'linear' or 'cosine', not 'cosin'"),
        ({"early_stop": {"patence": 3}}, "job one: no key named 'patence'; did you mean patience?"),
        (
            {"name": "one two"},
            "job one two: name: expected letters .A to Z., digits and _, and no digit first, not 'one",
        ),
        (
            {"name": "größe"},
            "job größe: name: expected letters .A to Z., digits and _, and no digit first, not 'größe'",
        ),
        ({"name": "1a"}, "job 1a: name: expected letters .A to Z., digits and _, and no digit first, not '1a'"),
        ({"name": "default"}, "expected another name"),
        ({"data": "nowhere.jsonl"}, "job one: .*nowhere.jsonl: no such file"),
        ({"data": "alpaca"}, "job one: no workload named 'alpaca'|job one: data 'alpaca' is no text"),
        ({"lora": {"rank": 4}}, "job one: .*rank"),
        ({"lora": {"r": 0}}, "job one: .*r: should be greater than or equal to 1"),
        ({"lora": {"bias": "all"}}, "job one: bias 'all' would be shared by all jobs; expected none"),
        ({"data": 5}, "job one: data"),
        ({"epochs": float("inf")}, "job one: epochs: "),
    ],
    ids=str,
)
def test_a_wrong_entry_is_one_line(written, change, says):
    with pytest.raises(JobsFileError, match=says) as refused:
        read(written({"name": "zero"}, change))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model": "tiny-lama"}, "did you mean tiny-llama?"),
        ({"weights": "auto"}, "an architecture without weights; expected weights: .*, or random"),
        ({"model": "smollm2-135m", "weights": "auto"}, "expected weights: smollm2-135m-instruct, or random"),
        ({"dtype": "float16"}, "dtype: should be 'auto', 'float32' or 'bfloat16'"),
        ({"way": "bached"}, "no way named 'bached'; did you mean batched?"),
        ({"way": "sdpa"}, "no way named 'sdpa'"),
        ({"way": {"batched": {"token": 3}}}, "did you mean tokens?"),
        ({"scheduler": "fast_fid"}, "no scheduler named 'fast_fid'; did you mean fast_fit?"),
        ({"scheduler": "packing"}, "no scheduler named 'packing'"),
        (
            {"scheduler": {"fifo": {"tokens": 0}}},
            "tokens: should be greater than 0 or should be 'auto', not 0",
        ),
        ({"way": "sequential", "scheduler": "fifo"}, "fifo excludes sequential"),
        ({"ablations": ["eager", "sdpa"]}, "both fill the slot attention"),
        ({"ablations": ["ddp"]}, "ddp is no toggle for jobs that train on one GPU"),
        ({"jobs_": []}, "no key named 'jobs_'; did you mean jobs?"),
        ({"output": None}, "output: expected a folder"),
        ({"output": ""}, "output: expected a folder"),
        ({"save_every": 0}, "save_every: should be greater than or equal to 1"),
    ],
    ids=str,
)
def test_a_wrong_key_is_one_line(written, keys, says):
    with pytest.raises(JobsFileError, match=says) as refused:
        read(written(**keys))
    assert "\n" not in str(refused.value)


def test_a_scheduler_leaves_the_ways_that_go_with_it(written):
    found = read(written({}), {"scheduler": {"fast_fit": {"tokens": 4096}}})
    assert "sequential" in ways() and "sequential" not in ways(found) and "batched" in ways(found)


def test_the_command_line_reads_a_scheduler_as_the_file_would(written):
    from lorabench.jobs import _file

    found = _file([str(written({})), "scheduler={fast_fit: {tokens: 4096}}", "way=batched"])
    assert found.scheduler == {"fast_fit": {"tokens": 4096}} and found.way == "batched"
    with pytest.raises(ValueError, match="it is no YAML"):
        _file([str(written({})), "scheduler={fast_fit: {tokens"])


def test_two_jobs_of_one_name_and_no_job_at_all(written, tmp_path):
    with pytest.raises(JobsFileError, match=r"two jobs are named 'one'; expected a name of its own for each$"):
        read(written({}, {}))
    for text, says in (("model: tiny-llama\njobs: []", "jobs: expected at least one, not 0$"), ("[", "it is no YAML")):
        (tmp_path / "wrong.yaml").write_text(text)
        with pytest.raises(JobsFileError, match=says):
            read(tmp_path / "wrong.yaml")
    with pytest.raises(JobsFileError, match="no such file; expected a YAML file"):
        read(tmp_path / "none.yaml")


def test_the_command_says_it_before_torch_is_imported(written, tmp_path):
    path = written({"batch_size": 0})
    code = f"import sys\nfrom lorabench import cli\ncode = cli.main(['jobs', {str(path)!r}])\n"
    code += f"print([n for n in {HEAVY} if n in sys.modules])\nsys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    first, modules = done.stdout.splitlines()
    assert done.returncode == 2 and modules == "[]" and first.endswith(f"reading {path}")
    assert done.stderr.startswith(f"lorabench: {path}: job one: batch_size") and done.stderr.count("\n") == 1
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("argument", ["outptu=x", "output", "output=", "output=null"])
def test_a_wrong_argument_is_one_line(written, argument, capsys):
    from lorabench import jobs

    assert jobs.main([str(written()), argument]) == 2
    assert capsys.readouterr().err.count("\n") == 1
