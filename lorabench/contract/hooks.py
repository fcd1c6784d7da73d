"""Asking a toggle: a wrong answer, or what a hook raises, comes with the names of the toggle and the hook.

A toggle may be anybody's code. What it does wrong is the outcome of its own cells, and their records say whose doing it
was.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from lorabench.contract.ablation import Ablation, NotApplied, Unsupported
from lorabench.contract.batch import Batch
from lorabench.contract.machine import Machine
from lorabench.contract.model import ModelSpec
from lorabench.contract.reading import WeightsForm, WeightsReader
from lorabench.contract.rehearsal import Capacity, Sizing
from lorabench.contract.settings import Settings
from lorabench.contract.text_metrics import TextMetrics

Hook = Callable[..., Any]
WORD = "the toggle "  # how a note of ours begins: others may add notes to an exception too


class HookError(Exception):
    """A hook that answered what the contract does not allow. The message names the toggle and the hook."""


@contextmanager
def contained(whose: str) -> Iterator[None]:
    """For a toggle's code, which must not end the process that runs it: what it raises that is no Exception, as
    `sys.exit()` does, becomes a HookError. Ctrl-C goes through, and so does any other exception, with a note of `whose`
    it is."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        error.add_note(whose)
        raise
    except BaseException as error:
        raise HookError(f"{whose} raised {described(error)}") from error


def asked(ablation: Ablation, hook: Hook, *args: Any, **kwargs: Any) -> Any:
    """What a toggle answers when its hook is called with these arguments; `hook` is Ablation's own (`Ablation.patch`).

    Raises HookError for an answer of another type than the contract's, and in place of what would end the process. Any
    other exception of the hook is raised on, its type unchanged (out of memory, Unsupported, …), with a note of where
    it came from, which `described` shows.
    """
    whose = _whose(ablation, hook.__name__)
    try:
        with contained(whose):
            answer = getattr(ablation, hook.__name__)(*args, **kwargs)
    except (Unsupported, NotApplied) as error:
        if message_of(error):
            raise
        raise type(error)(f"{whose} gave no reason") from error
    expected = EXPECTED.get(hook)
    if expected is not None and not expected.allows(answer):
        raise wrong_answer(ablation, hook.__name__, answer, expected.words)
    return answer


def asked_requires(ablation: Ablation | type[Ablation], machine: Machine, model: ModelSpec | None = None) -> str | None:
    """`Requires.unmet` of a toggle or of its class, asked likewise: what is not met, in words, or None."""
    hook = "requires.unmet"
    with contained(_whose(ablation, hook)):
        answer = ablation.requires.unmet(machine, model)
    if answer is None or _is_reason(answer):
        return answer
    raise wrong_answer(ablation, hook, answer, EXPECTED[Ablation.without_effect].words)


def wrong_answer(ablation: Ablation | type[Ablation], hook: str, answer: Any, expected: str) -> HookError:
    return HookError(f"{_whose(ablation, hook)} returned {reprlib.repr(answer)}; expected {expected}")


def _whose(ablation: Ablation | type[Ablation], hook: str) -> str:
    return f"{WORD}{ablation.name}'s {hook}"


@dataclass(frozen=True)
class Answer:
    """What a hook may answer, and how that is called."""

    words: str
    allows: Callable[[Any], bool]


def _is_count(answer: Any) -> bool:
    return isinstance(answer, Integral) and int(answer) >= 0


def _is_reason(answer: Any) -> bool:
    return isinstance(answer, str) and bool(answer.strip())


def _or_none(allows: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda answer: answer is None or allows(answer)


def _is_filled_list(answer: Any) -> bool:
    return isinstance(answer, list) and bool(answer)


# Of the hooks that change something in place nothing is expected. What must be torch's is known by what is asked of it.
EXPECTED: dict[Hook, Answer] = {
    Ablation.patch: Answer("a number of sites, or None", _or_none(_is_count)),
    Ablation.audit: Answer("a number of sites", _is_count),
    Ablation.notes: Answer("a dictionary", lambda answer: isinstance(answer, Mapping)),
    Ablation.without_effect: Answer("a reason in words, or None", _or_none(_is_reason)),
    Ablation.build: Answer("a module, or None", _or_none(lambda answer: hasattr(answer, "named_parameters"))),
    Ablation.shard: Answer("a list of samples, or None", _or_none(lambda answer: isinstance(answer, list))),
    Ablation.batch: Answer("a list of batches, or None", _or_none(_is_filled_list)),
    Ablation.collate: Answer("a Batch", lambda answer: isinstance(answer, Batch)),
    Ablation.optimize: Answer("an optimizer, or None", _or_none(lambda answer: hasattr(answer, "param_groups"))),
    Ablation.join: Answer("a list of steps, or None", _or_none(_is_filled_list)),
    Ablation.schedule: Answer("a list of micro-batches, or None", _or_none(_is_filled_list)),
    Ablation.step: Answer("a Step", lambda answer: hasattr(answer, "innermost")),
    Ablation.training: Answer("a Step", lambda answer: hasattr(answer, "innermost")),
    Ablation.size: Answer("a Sizing, or None", _or_none(lambda answer: isinstance(answer, Sizing))),
    Ablation.capacity: Answer("a Capacity, or None", _or_none(lambda answer: isinstance(answer, Capacity))),
    Ablation.read: Answer("a WeightsReader, or None", _or_none(lambda answer: isinstance(answer, WeightsReader))),
    Ablation.text_metrics: Answer("TextMetrics, or None", _or_none(lambda answer: isinstance(answer, TextMetrics))),
    Ablation.form: Answer("a WeightsForm, or None", _or_none(lambda answer: isinstance(answer, WeightsForm))),
    Ablation.settings: Answer("Settings, or None", _or_none(lambda answer: isinstance(answer, Settings))),
}

_NOTES = TypeAdapter(dict[str, Any], config=ConfigDict(ser_json_inf_nan="strings"))  # as a record holds them


def noted(ablation: Ablation, evidence: Any) -> dict[str, Any]:
    """A toggle's `notes` as a record will hold them. Raises HookError where JSON cannot, and what the hook raises."""
    answer = asked(ablation, Ablation.notes, evidence)
    try:
        return _NOTES.validate_json(_NOTES.dump_json(_NOTES.validate_python(dict(answer))))
    except (ValueError, TypeError, RecursionError) as error:  # pydantic's and Unicode's errors are ValueErrors
        raise wrong_answer(ablation, "notes", answer, f"what JSON can hold ({first_line(error)})") from None


def described(error: BaseException) -> str:
    """An exception in one line, with the toggle and the hook that it came from where these are known, and with the
    exception that it was raised from: of a pipeline's stage torch's own says no more than the stage."""
    words = first_line(error)
    if isinstance(error, HookError):
        return words
    what = f"{type(error).__name__}: {words}"
    if (cause := first_cause(error)) is not error:
        what += f" from {type(cause).__name__}: {first_line(cause)}"
    whose = next((n for n in getattr(error, "__notes__", ()) if isinstance(n, str) and n.startswith(WORD)), None)
    return f"{whose} raised {what}" if whose else what


def first_cause(error: BaseException) -> BaseException:
    """The exception that this one was raised from, and that from another one, up to the first."""
    return first_cause(error.__cause__) if error.__cause__ else error


def message_of(error: BaseException) -> str:
    """An exception's message. Its words are a toggle's code too, and may raise."""
    try:
        return str(error).strip()
    except KeyboardInterrupt:
        raise
    except BaseException as own:
        return f"no message: asked for its words it raised {type(own).__name__}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, at most 500 characters, in what UTF-8 can hold."""
    return printable((message_of(error).splitlines() or ["no message"])[0][:500])


def printable(text: str) -> str:
    """A text that can be written as UTF-8: a surrogate, which cannot, becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


PLAIN = (str, int, float, tuple)  # a default of another type may have no words of its own, and would change the key


@dataclass(frozen=True, kw_only=True)
class Faulty(Ablation):
    """Stands for a toggle whose constructor raised, or which says something of itself that planning cannot use, so
    that planning can go on. It has the toggle's name and place, and its cells are refused with `fault`."""

    given: Mapping[str, Any]
    parameters: Mapping[str, Any]  # with the defaults: what the toggle itself would have in its cell's key
    fault: str

    @classmethod
    def of(cls, toggle: type[Ablation], given: Mapping[str, Any], fault: str) -> Faulty:
        defaults = {f.name: f.default if isinstance(f.default, PLAIN) else None for f in fields(toggle)}
        made = cls(given=given, parameters=defaults | dict(given), fault=fault)
        vars(made).update(  # of the class in every other toggle
            name=toggle.name, slot=toggle.slot, kinds=toggle.kinds, bounds=toggle.bounds, parallel=toggle.parallel,
            process_a_job=toggle.process_a_job,
        )  # fmt: skip
        return made

    @property
    def label(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.given.items())
        return printable(f"{self.name}({given})" if given else self.name)
