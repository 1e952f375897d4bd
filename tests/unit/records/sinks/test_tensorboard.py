from tests.unit.records.sinks.tracked import ENCODED, write


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload()


def numbers(read, tag) -> list[tuple[int, float]]:
    return [(e.step, round(e.value, 3)) for e in read.Scalars(tag)]


def text(event) -> str:
    return event.tensor_proto.string_val[0].decode()


def test_events_hold_scalars_and_texts_and_a_resumed_run_hides_the_steps_that_it_repeats(tmp_path):
    write(tmp_path / "mine")
    write(tmp_path / "mine", restored_step=1)
    read = events(tmp_path / "mine")
    assert numbers(read, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3)] and numbers(read, "eval/pass@1") == [(0, 0.5)]
    samples = read.Tensors("completions/text_summary")
    assert [e.step for e in samples] == [1, 2, 2, 3]  # this reader hides repeated scalars only
    best, worst = text(samples[0]).split("\n\nresponse\n\n")[1:]
    assert text(samples[0]).startswith("prompt\n\n    3 + 4?\n\nresponse")
    # indented, so Markdown shows it as it is
    assert best.startswith("".join(f"    {line}\n" for line in ENCODED.splitlines()))
    assert "reward 1.0, exact 1.0, judge None, exact/found 7, advantage 1.0" in best and worst.startswith("    8\n")
    (config,) = read.Tensors("config/text_summary")
    assert "      name: mine" in text(config)


def test_completions_are_sent_every_k_steps_or_never(tmp_path):
    for name, every, steps in ("second", 2, [2]), ("never", 0, []):
        write(tmp_path / name, f"run.log_completions_steps={every}")
        read = events(tmp_path / name)
        sent = read.Tensors("completions/text_summary") if "completions/text_summary" in read.Tags()["tensors"] else []
        assert [e.step for e in sent] == steps
