"""How often each 95 % interval covers the truth, simulated: the table of docs/intervals.md.

    nice python benchmarks/interval_coverage.py [--runs 4000] [--seed 0]

A case is a way in which trials come about whose true ratio is known; `covered` counts how often the interval of
`lorabench.record.contrast` holds it. A coverage is accurate to ± 2 √(0.95 · 0.05 / runs), 0.007 of 4000 runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorabench.record import stats
from lorabench.record.contrast import Contrast, contrast, over_sessions

Random = np.random.Generator
Times = NDArray[np.float64]
SD = 0.01  # of a trial's logarithm
ROUNDS = (6, 10, 30, 60)


class Arms(NamedTuple):
    """Times of the reference and of the candidate in ms, drawn with a true ratio of 1."""

    reference: Times
    candidate: Times


def times(logs: Times) -> Times:
    return 100 * np.exp(SD * logs)


def autoregressive(random: Random, n: int, rho: float) -> Times:
    """n values of variance 1 with autocorrelation rho to the power of their distance."""
    values = random.normal(size=n)
    for i in range(1, n):
        values[i] = rho * values[i - 1] + np.sqrt(1 - rho**2) * values[i]
    return values


def outliers(random: Random, n: int, share: float) -> Times:
    """Independent trials of which a share is 5 to 20 % slow."""
    return random.normal(size=n) + (random.uniform(size=n) < share) * random.uniform(5, 20, n)


def _alike(draw: Callable[[Random, int], Times]) -> Callable[[Random, int], Arms]:
    return lambda random, n: Arms(times(draw(random, n)), times(draw(random, n)))


def _drift(random: Random, n: int) -> Arms:
    both = np.linspace(0, 50, n)
    return Arms(times(both + random.normal(size=n)), times(both + random.normal(size=n)))


def _drift_of_the_ratio(random: Random, n: int) -> Arms:
    return Arms(times(random.normal(size=n) + np.linspace(-1.5, 1.5, n)), times(random.normal(size=n)))


def _heteroscedastic(random: Random, n: int) -> Arms:
    return Arms(times(random.normal(size=n) * np.linspace(1, 6, n)), times(random.normal(size=n)))


def _slow_wave(random: Random, n: int) -> Arms:
    """A slow process under white noise, which is not autoregressive of the first order."""
    return Arms(times(autoregressive(random, n, 0.9) + random.normal(size=n)), times(random.normal(size=n)))


PAIRED: dict[str, Callable[[Random, int], Arms]] = {
    "independent": _alike(lambda random, n: random.normal(size=n)),
    "drift of both arms by half": _drift,
    "heteroscedastic arms (1 : 6, growing)": _heteroscedastic,
    "heavy tails (t, 3 degrees)": _alike(lambda random, n: random.standard_t(3, n)),
    "5 % slow trials": _alike(lambda random, n: outliers(random, n, 0.05)),
    "10 % slow trials": _alike(lambda random, n: outliers(random, n, 0.10)),
    "autocorrelation 0.3": _alike(lambda random, n: autoregressive(random, n, 0.3)),
    "autocorrelation 0.5": _alike(lambda random, n: autoregressive(random, n, 0.5)),
    "autocorrelation 0.7": _alike(lambda random, n: autoregressive(random, n, 0.7)),
    "autocorrelation 0.8": _alike(lambda random, n: autoregressive(random, n, 0.8)),
    "drift of the ratio by 3 %": _drift_of_the_ratio,
    "slow wave (0.9) under white noise": _slow_wave,
}


def paired(case: str, n: int, random: Random) -> Contrast:
    found = contrast(*PAIRED[case](random, n), paired=True)
    assert found is not None
    return found


def separate(processes: int, trials: int, between: float, random: Random, drift: float = 0.0) -> Contrast:
    """A B B A …: `between` is the spread between processes, `drift` the whole sweep's, in spreads between trials."""
    order = ([0, 1, 1, 0] * processes)[: 2 * processes]
    arms: list[list[Times]] = [[], []]
    for place, arm in enumerate(order):
        level = between * random.normal() + drift * place / len(order)
        arms[arm].append(times(level + random.normal(size=trials)))
    sizes = [trials] * processes
    found = contrast(np.concatenate(arms[0]), np.concatenate(arms[1]), False, processes=(sizes, sizes))
    assert found is not None
    return found


def between_seats(processes: int, spread: float, single: bool, random: Random, rounds: int = 30) -> Contrast:
    """Round by round between arms that sat apart: `spread` of a process in the logarithm, and 0.7 of autocorrelation in
    each. single: the reference was in one process throughout."""
    arms: list[list[Times]] = [[], []]
    of_reference = spread * random.normal()
    sizes = [len(part) for part in np.array_split(np.arange(rounds), processes)]
    for size in sizes:
        for arm, own in enumerate(arms):
            level = of_reference if single and not arm else spread * random.normal()
            own.append(100 * np.exp(level + SD * autoregressive(random, size, 0.7)))
    told = ([rounds] if single else sizes, sizes)
    found = contrast(np.concatenate(arms[0]), np.concatenate(arms[1]), True, processes=told)
    assert found is not None
    return found


def sessions(count: int, between: float, random: Random) -> Contrast:
    """`count` sessions of 30 paired rounds; `between` is the spread of their ratios, in spreads between trials."""
    made = []
    for _ in range(count):
        level = between * random.normal()
        found = contrast(times(level + random.normal(size=30)), times(random.normal(size=30)), paired=True)
        assert found is not None
        made.append(found)
    return over_sessions(made)


def covered(draw: Callable[[], Contrast], runs: int) -> float:
    """The share of runs whose interval holds 1."""
    return float(np.mean([found.low <= 1 <= found.high for found in (draw() for _ in range(runs))]))


def false_families(cells: int, between: float, runs: int, random: Random) -> float:
    """The share of families of A/A cells in separate processes in which any is called faster or slower."""
    wrong = 0
    for _ in range(runs):
        found = [separate(4, 8, between, random) for _ in range(cells)]
        adjusted = stats.holm([c.p_value() for c in found])
        said = [stats.verdict(c.speedup, p, trials=32) for c, p in zip(found, adjusted, strict=True)]
        wrong += any(word in ("faster", "slower") for word in said)
    return wrong / runs


def tables(runs: int, seed: int) -> Iterator[str]:
    """Markdown, a line at a time."""
    random = np.random.default_rng(seed)
    yield f"| paired rounds: {' | '.join(['case', *(f'n = {n}' for n in ROUNDS)])} |"
    yield "|---" * (1 + len(ROUNDS)) + "|"
    for case in PAIRED:
        shares = [covered(lambda n=n, case=case: paired(case, n, random), runs) for n in ROUNDS]
        yield f"| {case} | {' | '.join(f'{s:.3f}' for s in shares)} |"
    spreads = (0.0, 0.3, 1.0, 2.0)
    yield ""
    yield f"| separate processes, spread between them / within: | {' | '.join(map(str, spreads))} |"
    yield "|---" * (1 + len(spreads)) + "|"
    for name, count, trials, drift in (
        ("4 an arm, 8 trials each", 4, 8, 0.0),
        ("the same with a drift of three spreads", 4, 8, 3.0),
        ("2 an arm, 15 trials each (older records)", 2, 15, 0.0),
    ):
        shares = [covered(lambda s=s, c=count, t=trials, d=drift: separate(c, t, s, random, d), runs) for s in spreads]
        yield f"| {name} | {' | '.join(f'{s:.3f}' for s in shares)} |"
    families = [false_families(8, s, max(runs // 10, 10), random) for s in spreads]
    yield f"| families of 8 A/A cells with a false difference | {' | '.join(f'{s:.3f}' for s in families)} |"
    yield ""
    yield f"| sessions, spread between them / within: | {' | '.join(map(str, spreads))} |"
    yield "|---" * (1 + len(spreads)) + "|"
    for count in (1, 2, 3, 5):
        shares = [covered(lambda s=s, c=count: sessions(c, s, random), runs) for s in spreads]
        yield f"| {count} | {' | '.join(f'{s:.3f}' for s in shares)} |"
    yield ""
    apart = (0.0, 0.01, 0.03, 0.1)
    yield f"| 30 rounds between seats (autocorrelation 0.7), spread of a process: | {' | '.join(map(str, apart))} |"
    yield "|---" * (1 + len(apart)) + "|"
    for count in (2, 4):
        for single in (False, True):
            draws = [lambda s=s, c=count, one=single: between_seats(c, s, one, random) for s in apart]
            name = f"{count} seats against {'one' if single else count}"
            yield f"| {name} | {' | '.join(f'{covered(draw, runs):.3f}' for draw in draws)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for line in tables(asked.runs, asked.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
