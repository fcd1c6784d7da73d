"""What the words of a report mean."""

from __future__ import annotations

GLOSSARY = {
    "ok": "both arms ran, the toggle was engaged, its gradients passed the gate, and it was timed",
    "oom": "an arm ran out of GPU memory; where only the reference did, the candidate's own times are shown",
    "timeout": "the cell took longer than it was allowed to and was stopped",
    "crash": "an arm raised an error or its process died; the end of its output is with the cell",
    "wrong_numerics": "the loss or an adapter's gradient is further from plain PEFT than allowed: no speed is given",
    "untrusted": "the times cannot be trusted, for the reason that is given: none are shown",
    "not_applied": "the toggle changed nothing here, so there is nothing to time",
    "unsupported": "this machine, these packages or this model lack something that the toggle needs",
    "conflict": "toggles that cannot be on together",
    "faster / slower": "significant after Holm's correction over the sweep (p < 0.05), and the whole 95 % interval "
    "lies beyond the noise floor",
    "same": "the whole 95 % interval lies inside the noise floor: equal as far as this machine can tell",
    "faster / slower, few trials": "the same direction, from too few trials for a figure: the interval alone",
    "unclear": "none of these, for the reason beside the word; more trials or a quieter machine might tell. The "
    "interval is shown without a ratio",
    "interval is of": "the sessions that the interval knows; one session's says nothing of what differs in the next",
    "host-bound": "the device waits for its host in a fifth of the step or more: milliseconds, and the share of them "
    "that it waits. Such a ratio is of this host",
    "communication": "milliseconds of a step in which a collective's kernel ran on rank 0, waits for other ranks "
    "included; exposed: in which nothing else did",
    "range": "the reference took over 10 % longer in one session than in another: the sessions' ratios, without a mean",
    "noise floor": "how far the reference is from itself when measured twice (A/A) and paired alike, at least ±1 %",
    "detects": "the smallest true speed-up that as many trials would call faster 4 times out of 5",
    "speed-up": "reference time / candidate time: Hodges–Lehmann centre of the log ratios of paired trials, with a "
    "95 % interval of as many rounds as their autocorrelation leaves; throughput gain is the same and is not repeated",
    "J per 1000 real tokens": "what the whole GPU took while each arm stepped alone for some seconds after the trials",
    "abba": "the arms did not fit together, or a patch reaches beyond its model: separate processes, in A B B A order, "
    "and an interval of the spread between them",
    "turns": "a patch of an arm reaches beyond its model, so it sat in processes of its own: round by round between "
    "processes, and an interval of the spread between them",
    "baseline": "the arm that every ratio, verdict and bar of the page is over: the reference, until another is chosen",
    "within, between": "two arms over the rounds that they shared, within one process or between processes",
}
