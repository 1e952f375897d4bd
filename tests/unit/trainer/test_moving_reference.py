"""The steps at which the reference moves, and its mixing weight."""

from types import SimpleNamespace

from megagrpo.config import AlgorithmSection
from megagrpo.trainer.policy_update import Learning


def moves(**algorithm):
    """The mixing weights with which the reference moves at the end of steps 1 to 7; None where it stays."""
    found = []
    for step in range(7):
        shares = []
        told = SimpleNamespace(algorithm=AlgorithmSection(beta=0.1, **algorithm))
        reference, state = SimpleNamespace(mix_in=shares.append), SimpleNamespace(step=step)
        Learning.move_reference(SimpleNamespace(config=told, state=state, reference=reference))
        found.append(shares[0] if shares else None)
    return found


def test_the_reference_moves_by_its_share_at_every_so_many_steps_and_only_when_asked():
    moving = dict(sync_ref_model=True, ref_model_sync_steps=3, ref_model_mixup_alpha=0.25)
    assert moves(**moving) == [None, None, 0.25, None, None, 0.25, None]
    assert moves(**moving | dict(sync_ref_model=False)) == [None] * 7
