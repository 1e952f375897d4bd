"""The recorders of a run: each gets every call of a step, and the loss goes through all of them."""

from megagrpo.records.recorder import Recorder, Recorders, TrainedRollouts, Update


class Noting(Recorder):
    """Notes its calls, and adds its name to the result of the loss."""

    def __init__(self, name: str, calls: list):
        self.name, self.calls = name, calls

    def begin(self, rollouts):
        self.calls.append((self.name, "begin", rollouts.step))

    def record(self, loss_fn):
        return lambda inputs: loss_fn(inputs) + self.name

    def measured(self, update):
        self.calls.append((self.name, "measured", update.denominator))

    def trained(self, rollouts):
        self.calls.append((self.name, "trained", rollouts.step))

    def finish(self, rollouts):
        self.calls.append((self.name, "finish", rollouts.step))


def test_each_recorder_gets_every_call_in_order_and_the_first_is_next_to_the_loss():
    calls, rollouts = [], TrainedRollouts(3, [], [])
    recorders = Recorders((Noting("a", calls), Recorder(), Noting("b", calls)))
    recorders.begin(rollouts)
    assert recorders.record(lambda inputs: inputs)("loss ") == "loss ab"
    recorders.measured(Update(None, None, 7))
    recorders.trained(rollouts)
    recorders.finish(rollouts)
    steps = [("begin", 3), ("measured", 7), ("trained", 3), ("finish", 3)]
    assert calls == [(name, *step) for step in steps for name in "ab"]
