"""Agreement: all ranks go on together, or all raise the same error.

Every rank contributes an envelope to every phase, with an error where it has
one, so that no rank is left waiting for one that has raised.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from m2ncompile.errors import Problem, RunError
from m2ncompile.runtime.control import ControlPlane, Watch
from m2ncompile.runtime.deadline import Deadline

__all__ = ["Envelope", "agree", "rank_name"]


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says in a phase.

    `digest` is of what all must have alike, empty with an error; `note` is what
    the others may want to know.
    """

    phase: str
    world: int
    digest: str
    error: str | None = None
    note: str = ""


def rank_name(rank: int, trainers: int) -> str:
    """A communicator rank in words."""
    return f"trainer {rank}" if rank < trainers else f"worker {rank - trainers}"


def agree(
    control: ControlPlane,
    phase: str,
    digest: str,
    deadline: Deadline,
    *,
    trainers: int,
    title: str,
    error: str | None = None,
    note: str = "",
    watch: Watch | None = None,
) -> list[str]:
    """The notes of all ranks, by rank, once all have said the same digest and no error.

    Raises RunError, with the same text on every rank, which names each rank that
    does not agree and why. `trainers` is the number of trainer ranks.
    """
    mine = Envelope(phase, control.world, "" if error else digest, error, note)
    answers = control.exchange(msgspec.json.encode(mine), deadline, watch)
    problems: list[Problem] = []
    said: dict[int, Envelope] = {}
    if answers.vain is not None:
        problems.append(Problem(rank_name(0, trainers), answers.vain))
    for rank, answer in enumerate(answers.by_rank):
        if answer is None:
            if answers.vain is None:
                message = f"it did not answer within {answers.waited or 0:g} s, or is gone"
                problems.append(Problem(rank_name(rank, trainers), message))
            continue
        try:
            said[rank] = msgspec.json.decode(answer, type=Envelope)
        except msgspec.DecodeError as wrong:
            problems.append(
                Problem(rank_name(rank, trainers), f"its answer is no envelope: {wrong}")
            )
    phases = Counter(envelope.phase for envelope in said.values() if envelope.error is None)
    at = phases.most_common(1)[0][0] if phases else phase
    envelopes: dict[int, Envelope] = {}
    for rank, envelope in said.items():
        if envelope.error is not None:
            message = envelope.error  # also of one that left, which is at no phase
        elif envelope.phase != at:
            message = f'it is at "{envelope.phase}", most ranks are at "{at}"'
        elif envelope.world != len(answers.by_rank):
            message = f"it counts {envelope.world} ranks in all, not {len(answers.by_rank)}"
        elif not envelope.digest:
            message = "its answer has neither a digest nor an error"
        else:
            envelopes[rank] = envelope
            continue
        problems.append(Problem(rank_name(rank, trainers), message))
    digests = Counter(envelope.digest for envelope in envelopes.values())
    if len(digests) > 1:
        common = digests.most_common(1)[0][0]
        for rank, envelope in envelopes.items():
            if envelope.digest != common:
                message = f"its {at} is {envelope.digest[:60]}, most ranks have {common[:60]}"
                problems.append(Problem(rank_name(rank, trainers), message))
    if problems:
        failure = RunError(title, problems)
        failure.agreed = True
        raise failure
    return [envelopes[rank].note for rank in range(len(answers.by_rank))]
