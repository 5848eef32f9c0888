"""What the n-gram drafter of a rank reads of a request."""

from __future__ import annotations

from array import array

from baton.runtime.speculation.ngram import NgramDrafter
from baton.sched.types.request import SamplingParams, ValidatedRequest
from baton.sched.types.sequence import Seq


def sequence(
    handle: int,
    prompt: list[int],
    *,
    prediction: tuple[int, ...] = (),
    resumed: int = 0,
    tenant: str = "",
    namespace: bytes = b"",
) -> Seq:
    params = SamplingParams(max_new_tokens=20, resumed=resumed)
    request = ValidatedRequest(
        handle,
        f"r{handle}",
        array("i", prompt),
        params,
        namespace=namespace,
        tenant=tenant,
        prediction=array("i", prediction),
    )
    return Seq(request, array("i", prompt), 20)


def proposal(drafter: NgramDrafter, seq: Seq) -> list[int]:
    drafter.start(seq)
    (draft,) = drafter.propose([seq.handle], [3])
    return draft.tolist()


def test_prediction_follows_prompt() -> None:
    drafter = NgramDrafter(2, 0)
    assert proposal(drafter, sequence(1, [1, 2], prediction=(11, 12, 13, 14))) == [11, 12, 13]


def test_prediction_goes_on_behind_beginning_of_resumed_answer() -> None:
    drafter = NgramDrafter(2, 0)
    seq = sequence(1, [1, 2, 11, 12], prediction=(11, 12, 13, 14, 15, 16), resumed=2)
    assert proposal(drafter, seq) == [13, 14, 15]


def test_whole_answer_joins_store_where_its_beginning_was_resumed() -> None:
    drafter = NgramDrafter(2, 1000)
    proposal(drafter, sequence(1, [1, 2, 11, 12], resumed=2))
    drafter.append(1, array("i", [13]))
    drafter.finish(1)
    assert proposal(drafter, sequence(2, [11, 12])) == [13]


def test_answers_of_other_tenants_and_namespaces_are_not_proposed() -> None:
    drafter = NgramDrafter(2, 1000)
    proposal(drafter, sequence(1, [1, 2], tenant="a", namespace=b"b"))
    drafter.append(1, array("i", [11, 12, 13]))
    drafter.finish(1)
    for handle, tenant, namespace in ((2, "a", b""), (3, "", b"ab"), (4, "ab", b""), (5, "", b"")):
        seq = sequence(handle, [11, 12], tenant=tenant, namespace=namespace)
        assert proposal(drafter, seq) == []
    assert proposal(drafter, sequence(6, [11, 12], tenant="a", namespace=b"b")) == [13]
