"""The doctor: it says what this machine can run, and why not the rest."""

import pytest

from lorabench import doctor
from lorabench.measure.machine import describe


def test_it_fits_a_screen_and_names_what_cannot_run_by_what_it_lacks(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "precision" in text and "commit" in text and "torch " in text and text.count("\n") <= 40
    words = text.split()
    every = len(doctor.registered())
    assert f"of {every} ablations are available here" in " ".join(words)
    if describe().device == "cpu":
        assert "cuda_graph," in words and " ".join(words).count("needs a CUDA device") == 1 and "packing," not in words


@pytest.mark.parametrize(
    ("load", "device", "says"),
    [
        (
            3.14,
            "cpu",
            "3.1 on 2 cores: other processes disturb the times, and intervals widen; better measure while it",
        ),
        (1.0, "cpu", "1.0 on 2 cores"),
        (3.14, "cuda", "3.1 on 2 cores"),
    ],
)
def test_the_load_of_others_is_a_note_where_it_is_in_the_times(load, device, says, monkeypatch):
    monkeypatch.setattr(doctor, "load_average", lambda: load)
    machine = describe().model_copy(update={"cores": 2, "device": device})
    (found,) = [f for f in doctor.findings(machine) if f.what == "load"]
    assert found.words.startswith(says) and found.level == ("note" if "disturb" in says else "ok")
    assert "disturb" in says or found.words == says


def test_no_ablations_is_bad(monkeypatch):
    monkeypatch.setattr(doctor, "registered", dict)
    assert [f.level for f in doctor.findings(describe()) if f.what == "ablations"] == ["bad"]


@pytest.mark.parametrize("arguments, code", [(["--help"], 0), (["everything"], 2)])
def test_it_takes_no_arguments_but_help(arguments, code, capsys):
    with pytest.raises(SystemExit) as stopped:
        doctor.main(arguments)
    assert stopped.value.code == code
    said = capsys.readouterr()
    assert "usage: python -m lorabench.doctor" in said.out + said.err and "versions:" not in said.out
