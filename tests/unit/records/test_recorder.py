"""The recorders of a run: each gets every call of a step, and the loss goes through all of them."""

from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.records.rows.recorder import Recorder, Recorders, TrainedRollouts, Update


class Noting(Recorder):
    """Notes its calls, and adds its name to the result of the loss."""

    def __init__(self, name: str, calls: list):
        self.name, self.calls = name, calls

    def begin(self, rollouts):
        self.calls.append((self.name, "begin", rollouts.step))

    def wrap_loss(self, loss_fn):
        return lambda inputs: loss_fn(inputs) + self.name

    def after_update(self, update):
        self.calls.append((self.name, "after_update", update.denominator))

    def after_training(self, rollouts):
        self.calls.append((self.name, "after_training", rollouts.step))

    def finish(self, rollouts):
        self.calls.append((self.name, "finish", rollouts.step))


def test_each_recorder_gets_every_call_in_order_and_the_first_is_next_to_the_loss():
    calls, rollouts = [], TrainedRollouts(3, StepSamples.of([]), [])
    recorders = Recorders((Noting("a", calls), Recorder(), Noting("b", calls)))
    recorders.begin(rollouts)
    assert recorders.wrap_loss(lambda inputs: inputs)("loss ") == "loss ab"
    recorders.after_update(Update(None, None, 7))
    recorders.after_training(rollouts)
    recorders.finish(rollouts)
    steps = [("begin", 3), ("after_update", 7), ("after_training", 3), ("finish", 3)]
    assert calls == [(name, *step) for step in steps for name in "ab"]
