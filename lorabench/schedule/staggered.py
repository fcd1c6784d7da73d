"""`staggered`: ours. The jobs' global batches end at different times, so that no stage waits for an optimizer step.

Whoever packs the jobs round by round lets all of them end at once, and the pipeline runs empty. Here a micro-batch is
made for its place in the pipeline: of the jobs whose last optimizer step the bubble lemma lets be over by then, the one
that has got furthest in its global batch comes first, longest samples first, and the others fill what it leaves.
"""

from __future__ import annotations

from lorabench.schedule.batches import Budget, Jobs, MicroBatch, Sample, real, rounds


def staggered(jobs: Jobs, budget: Budget, stages: int = 1) -> list[MicroBatch]:
    """Raises ValueError as every scheduler does."""
    waiting: dict[int, list[list[Sample]]] = {}
    for batches in rounds(jobs, budget):
        for batch in filter(None, batches):
            waiting.setdefault(batch[0].job, []).append(sorted(batch, key=lambda s: -s.tokens))
    ready, tokens = dict.fromkeys(waiting, 0), {job: sum(map(real, own)) for job, own in waiting.items()}
    whole = {job: len(batches[0]) for job, batches in waiting.items()}
    made, at = list[MicroBatch](), 0
    while waiting:
        may = [job for job in waiting if ready[job] <= at]
        held: list[Sample] = []
        for job in sorted(may, key=lambda job: (len(waiting[job][0]) / whole[job], -tokens[job])):
            batch, own = waiting[job][0], len(held)
            for sample in batch:
                if budget.takes(held, [sample]):
                    held.append(sample)
            tokens[job] -= real(held[own:])
            waiting[job][0] = [sample for sample in batch if sample not in held[own:]]
            if not waiting[job][0]:
                del waiting[job][0]
                ready[job] = at + stages
                if waiting[job]:
                    whole[job] = len(waiting[job][0])
                else:
                    del waiting[job]
        made += [tuple(held)] if held else []  # where no job may go on, `fill` puts the empty one
        at += 1
    return made
