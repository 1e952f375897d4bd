"""The page in a real browser: every control is used, and text of a run never becomes code."""

import json
import re
import shutil

import pytest

from megagrpo.proof.report import page as writer
from megagrpo.proof.report.collect import read_run
from megagrpo.proof.report.payload import payload
from tests.unit.proof.report.synthetic import append, make_conversations, make_run

pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="needs Chromium: apt-get install chromium chromium-driver",
)
HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<b>bold</b> &amp; {{head}} ${window.hacked=1}",
    "\x1b]0;title\x07 \u202eevil\u2066 \ud800 \x00 \u2028",
    "javascript:window.hacked=1",
    "x" * 200_000,
    "<!--<script>",
    "]]>\r\n'\"`",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from tests.unit.proof.report.browser import opened_browser

    with opened_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def show(browser, folder, *runs) -> None:
    """Open the page of the runs; it must load without an error or a request."""
    data = payload([read_run(run) for run in runs], writer.static_bytes())
    writer.write(writer.render(data), folder / "report.html")
    browser.open(folder / "report.html")


def calm(browser) -> None:
    """Assert that nothing failed, nothing was fetched, and no text of the run ran."""
    assert browser.errors() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:", "chrome:"))] == []
    assert browser.js("return window.hacked") is None


def chart(browser, name: str, code: str):
    """The value of an expression of the plot `p` of a chart."""
    browser.js(f"document.getElementById('chart-{name}').scrollIntoView()")
    browser.until(lambda: browser.js(f"return !!document.getElementById('chart-{name}').plot.uplot"))
    return browser.js(f"const p = document.getElementById('chart-{name}').plot; return {code}")


def chart_order(browser) -> list[str]:
    """The charts of the first section, in order."""
    return browser.js("return [...document.querySelectorAll('#learning .chart')].map((card) => card.id)")


@pytest.fixture(scope="module")
def one(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run = make_run(folder / "first", steps=9, groups=7, size=4)
    append(run / "metrics.jsonl", {"step": 10, "reward": None, "time/step": 1.0})  # a step with NaN in its reward
    show(browser, folder, run)
    return browser


def test_the_head_shows_the_result_and_the_plots_hold_the_numbers_of_the_run(one):
    assert one.texts("h1") == ["first"]
    assert one.texts(".pill") == ["finished, 10 steps", "Metrics are not numbers", "Most groups have equal rewards"]
    assert one.texts(".tile.result") == ["Evaluation pass@195%↑ from 25%"]
    xs, ys = chart(one, "reward", "[[...p.uplot.data[0]], [...p.uplot.data.at(-1)]]")
    assert xs == list(range(1, 11)) and ys[9] is None and 0.1 < ys[0] < 0.4 < ys[8] < 1
    assert chart(one, "evaluation", "[...p.uplot.data[0]]") == [0, 3, 6, 9]
    seconds = chart(one, "phases", "p.lines.map((line) => [line.label, line.own[0]])")
    assert [name for name, _ in seconds] == ["generate", "reward", "logprobs", "train", "sync", "other"] and seconds[0][
        1
    ] > 5
    calm(one)


def test_every_place_shows_a_quantity_with_the_same_digits(one):
    reward, memory = one.texts("#chart-reward .chip b")[0], one.texts("#chart-memory .chip b")[0]
    assert (
        one.texts(".tile strong")[1] == reward
        and one.texts(".tile strong")[5] == memory == "42 GiB"
        and len(reward) >= 5
    )


def test_three_evaluations_are_beside_the_reward(one):
    assert chart_order(one)[:2] == ["chart-reward", "chart-evaluation"]


def test_hover_shows_the_values_of_a_step_and_arrow_keys_move_the_cursor(one):
    from selenium.webdriver.common.keys import Keys

    chart(one, "reward", "p.area.focus()")
    one.type("#chart-reward .plot", Keys.HOME)
    assert one.texts("#chart-reward .at") == ["step 1"]
    one.type("#chart-reward .plot", Keys.ARROW_RIGHT)
    assert one.texts("#chart-reward .at") == ["step 2"]
    chart(one, "entropy", "1")
    assert one.texts("#chart-entropy .at") in (["step 2"], [])  # plots that are in view follow
    calm(one)


def test_a_drag_zooms_every_plot_and_the_button_resets(one):
    from selenium.webdriver import ActionChains

    chart(one, "reward", "1")
    over = one.all("#chart-reward .u-over")[0]
    width = over.size["width"]
    ActionChains(one.driver).move_to_element_with_offset(over, -width // 4, 0).click_and_hold().move_by_offset(
        width // 2, 0
    ).release().perform()
    low, high = chart(one, "reward", "[p.uplot.scales.x.min, p.uplot.scales.x.max]")
    assert (
        2 < low < 5
        and 6 < high < 9
        and chart(one, "entropy", "[p.uplot.scales.x.min, p.uplot.scales.x.max]") == [low, high]
    )
    one.click("#reset-zoom")
    assert chart(one, "entropy", "[p.uplot.scales.x.min, p.uplot.scales.x.max]") == [1, 10]
    calm(one)


def test_logarithmic_axis_and_smoothing_can_be_chosen_and_the_page_follows_the_system_colours(one):
    chart(one, "entropy", "1")
    one.click("#chart-entropy .card-head button", "log")
    assert chart(one, "entropy", "p.uplot.scales.y.distr") == 3
    raw = chart(one, "grad", "[...p.uplot.data[1]].slice(0, 9)")
    one.js("const s = document.getElementById('smoothing'); s.value = 0.9; s.dispatchEvent(new Event('input'))")
    smooth = chart(one, "grad", "[...p.uplot.data[2]].slice(0, 9)")
    assert (
        chart(one, "grad", "[...p.uplot.data[1]].slice(0, 9)") == raw
        and max(smooth) - min(smooth) < (max(raw) - min(raw)) / 2
    )
    one.js("const s = document.getElementById('smoothing'); s.value = 0; s.dispatchEvent(new Event('input'))")
    for scheme, color in (("dark", "rgb(16, 17, 20)"), ("light", "rgb(247, 246, 243)")):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        one.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        assert one.js("return getComputedStyle(document.body).backgroundColor") == color
    calm(one)


def test_responses_are_filtered_sorted_and_chosen_by_step(one):
    count = lambda: one.texts("#responses .count")[0]  # noqa: E731
    assert one.texts(".step output") == ["step 9"] and count() == "28 of 28 responses in 7 of 7 groups"
    assert len(one.all(".group")) == 5
    one.click(".more")
    assert len(one.all(".group")) == 7
    one.click("#responses .step button", "←")
    one.until(lambda: "What is 8 + 0?" in "".join(one.texts(".prompt p")))
    one.type("[name=search]", one.texts(".prompt p")[0])  # the group with the largest spread
    assert count() == "4 of 28 responses in 1 of 7 groups"
    one.click(".response-table th button", "advantage")
    values = [float(text.replace("−", "-")) for text in one.texts(".response-table td[data-label=advantage]")]
    assert values == sorted(values, reverse=True) and values[0] > values[-1]
    one.click(".response-table th button", "advantage")
    assert one.texts("th[aria-sort=ascending]") == ["advantage"]
    assert [float(text.replace("−", "-")) for text in one.texts(".response-table td[data-label=advantage]")] == values[
        ::-1
    ]
    one.js("const e = document.querySelector('[name=search]'); e.value = ''; e.dispatchEvent(new Event('input'))")
    for name in ("cut", "mixed", "logged"):
        one.click(f"[name={name}]")
        shown, total = map(int, re.match(r"(\d+) of (\d+)", count()).groups())
        assert shown < total or name == "mixed"
        one.click(f"[name={name}]")
    one.type("[name=low]", "1")
    assert set(one.texts(".response-table td[data-label=reward]")) == {"1"}
    one.js("const e = document.querySelector('[name=low]'); e.value = ''; e.dispatchEvent(new Event('input'))")
    one.js("const e = document.querySelector('[name=order]'); e.value = 'best'; e.dispatchEvent(new Event('change'))")
    means = [float(re.search(r"mean reward ([\d.]+)", text)[1]) for text in one.texts(".meta")]
    assert means == sorted(means, reverse=True)
    calm(one)


@pytest.mark.parametrize(
    "mode, selector", [("ratio", ".token.more, .token.less"), ("entropy", ".token.heat"), ("surprise", ".token.heat")]
)
def test_tokens_are_coloured_and_show_their_numbers(one, mode, selector):
    one.click(f".colors button[data-value={mode}]")
    assert len(one.all(selector)) > 10 and "tokens logged" in one.texts(".group .meta")[0]
    one.js("document.querySelector('.token').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))")
    assert (
        not one.all(".tooltip[hidden]") and "vLLM" in one.texts(".tooltip")[0] and "ratio" in one.texts(".tooltip")[0]
    )
    calm(one)


def test_responses_are_coloured_by_advantage_and_truncation(one):
    one.click(".colors button[data-value=advantage]")
    assert one.all(".tinted.good") and one.all(".tinted.bad")
    one.click(".colors button[data-value=cut]")
    assert len(one.all(".tinted.cut")) == len(one.all(".marker.cut")) > 0
    one.click(".colors button[data-value=none]")
    assert not one.all(".tinted")
    calm(one)


def test_the_config_shows_changed_keys_and_can_show_and_search_all(one):
    assert "run.name" in one.texts(".config tbody th") and "run.seed" not in one.texts(".config tbody th")
    one.click("#configuration .choice button", "all")
    one.type("#configuration input", "run.max_steps")
    assert one.texts(".config tbody th") == ["run.max_steps"] and one.texts(".config td.changed") == ["9"]
    calm(one)


def test_more_metrics_and_checks_are_there(one):
    one.click(".more-metrics summary")
    one.until(lambda: "rewards/exact_number/std" in one.texts(".more-metrics h3"))  # the event of the click comes later
    assert len(one.texts(".checks li.ok")) == 10
    calm(one)


def test_several_runs_are_overlaid_and_their_differences_listed(browser, tmp_path):
    runs = [
        make_run(tmp_path / name, steps=4, groups=2, seed=i, evaluate=i == 0, overrides=(f"run.seed={i}",))
        for i, name in enumerate(("a", "b"))
    ]
    show(browser, tmp_path, *runs)
    assert browser.texts("h1") == ["2 runs compared"]
    assert [text.partition("started")[0] for text in browser.texts(".comparison tbody th")] == ["a", "b"]
    assert chart(browser, "reward", "p.lines.filter((line) => line.label).map((line) => line.label)") == ["a", "b"]
    browser.click(".legend button", "a")
    assert chart(browser, "reward", "p.lines.filter((line) => line.label).map((line) => line.label)") == ["b"]
    assert browser.texts(".config tbody th") == ["run.name", "run.seed"]
    browser.click("#responses .filters > .choice button[data-value='1']")
    browser.until(lambda: browser.texts(".group"))
    browser.click("#chart-phases .choice button", "b")
    calm(browser)


def test_a_run_without_evaluation_responses_config_and_most_metrics_has_a_page(browser, tmp_path):
    append(tmp_path / "metrics.jsonl", {"step": 1, "reward": None, "loss": 0.5, "grad_norm": None})
    show(browser, tmp_path, tmp_path)
    assert (
        browser.texts(".pill") == ["stopped after step 1", "Metrics are not numbers"]
        and "no responses" in browser.texts("#responses")[0]
    )
    assert "Versions were not recorded." in browser.texts("#records")[0]
    assert chart(browser, "loss", "[...p.uplot.data[1]]") == [0.5]
    calm(browser)


def test_hostile_text_stays_text(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=2, groups=2, size=2)
    for i, text in enumerate(HOSTILE):
        row = dict(step=3, prompt_id=i, prompt=[{"role": text[:50], "content": text}], completion=text) | dict(
            rewards={text[:50]: 1.0, "b": 0.0}
        )
        append(
            run / "completions.jsonl",
            row
            | {"reward": 0.5, "advantage": 0.1, "num_tokens": 3, "finish_reason": text[:9], "extra": {text[:50]: text}},
        )
        logprobs = {"rollout_logprobs": [-1.0], "trainer_logprobs": [-1.0], "entropy": [0.1]}
        append(run / "tokens.jsonl", {"step": 3, "sample": i, "prompt_id": i, "tokens": [text]} | logprobs)
        append(run / "messages.jsonl", {"step": 3, "text": f"warning: {text}"})
        append(run / "metrics.jsonl", {"step": 3 + i, f"rewards/{text[:50]}/mean": 0.5, text[:50]: 1.0})
    name, path, key, value = map(json.dumps, (HOSTILE[0], HOSTILE[1], HOSTILE[2], HOSTILE[4]))
    config = f"run:\n  name: {name}\nmodel:\n  path: {path}\n{key}: {value}\n"
    (run / "resolved.yaml").write_text(config)
    append(
        run / "starts.jsonl",
        {"step": 0, "versions": {HOSTILE[0]: HOSTILE[1]}, "device": HOSTILE[1], "layout": HOSTILE[0], "ranks": "x"},
    )
    show(browser, tmp_path, run)
    assert browser.texts("h1") == [HOSTILE[0]] and browser.js("return document.title").startswith(HOSTILE[0])
    assert browser.texts(".facts dd")[0] == HOSTILE[1]
    browser.click(".more")
    shown = "".join(browser.texts(".response .text"))
    for text in (
        HOSTILE[0],
        HOSTILE[1],
        HOSTILE[2],
        "\\x1b]0;title\\x07 \\u202eevil\\u2066 \\ud800 \\x00 \\u2028",
        "196,000 characters left out",
    ):
        assert text in shown
    assert any(HOSTILE[1] in text for text in browser.texts(".extra span"))
    browser.click(".colors button[data-value=entropy]")
    assert HOSTILE[1] in browser.texts(".token")
    browser.click(".more-metrics summary")
    browser.click("#configuration .choice button", "all")
    assert not browser.all("#app script, #app img, #app b b") and not browser.js(
        "return document.querySelectorAll('iframe, object, link').length"
    )
    # no long word widens the page
    assert browser.js("return document.documentElement.scrollWidth <= window.innerWidth")
    calm(browser)


@pytest.fixture(scope="module")
def talks(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("talks")
    run = make_conversations(folder / "talks")
    tokens = {name: [-0.5] * 84 for name in ("rollout_logprobs", "trainer_logprobs", "entropy")}
    tokens["trainer_logprobs"] = tokens["entropy"] = [
        -1.5 if i < 34 or 46 <= i < 61 or i >= 73 else None for i in range(84)
    ]
    append(
        run / "tokens.jsonl",
        {"step": 3, "sample": 0, "prompt_id": 0, "tokens": [f" t{i}" for i in range(84)], **tokens},
    )
    show(browser, folder, run)
    return browser


def test_a_conversation_is_a_tree_of_turns_calls_and_branches(talks):
    talks.until(lambda: talks.all("#responses .talk"))
    first = "#responses .group:first-child tbody tr:nth-child(1) "
    head = talks.texts(first + ".talk-head")[0]
    assert "6 turns" in head and "2 tool calls" in head and "3 samples" in head and "88 tokens trained" in head
    names = talks.texts(first + ".talk > .tree > .own .say-head b")
    assert names == ["turn 1", "turn 2", "turn 3"]
    assert talks.texts(first + ".talk > .tree > .own .call-name") == [
        'calculator(expression: "17*24")',
        'calculator(expression: "408-39")',
    ]
    assert talks.texts(first + ".talk > .tree > .own .call-result") == ["408", "369"]
    assert "answered in 1.31 s" in talks.texts(first + ".talk > .tree > .own .after")[1]
    assert "12 context tokens, not trained" in talks.texts(first + ".talk > .tree > .own .after")[1]
    order = talks.js("return [...document.querySelector('#responses .talk > .tree').children].map((e) => e.className)")
    assert order == ["branch", "say own", "branch", "say own", "say own", "end"]  # each where it leaves the trajectory
    assert "Check the product" in talks.texts(first + ".branch")[1]
    assert "reward +0.25" in talks.texts("#responses .group:first-child tbody tr:nth-child(2) .say-head")[-2]
    assert "retried once" in talks.texts("#responses .group:first-child tbody tr:nth-child(2) .talk-head")[0]
    assert "time limit" in talks.texts("#responses .group:first-child tbody tr:nth-child(3) .talk-head")[0]
    calm(talks)


def test_samples_that_ran_at_once_are_bars_on_one_time_axis(talks):
    talks.until(lambda: talks.all("#responses .talk"))
    first = "#responses .group:first-child tbody tr:nth-child(1) "
    assert talks.texts(first + ".talk-lanes > span") == ["branch 1", "main", "branch 2"]
    bars = talks.js(
        "return [...document.querySelectorAll(arguments[0])].map((lane) => { const all = [...lane.children].map((bar) => "
        "bar.getBoundingClientRect()); return [all[0].left, all.at(-1).right, lane.getBoundingClientRect().right]; })",
        first + ".talk-lane",
    )
    (draft, drafted, _), (main, done, end), (critic, reviewed, _) = bars
    assert draft < drafted <= main < critic < reviewed < done and done == pytest.approx(end, abs=3)
    assert "from 0 s to 400 ms" in talks.texts(first + ".branch summary")[0]
    assert "from 1 s to 1.82 s" in talks.texts(first + ".branch summary")[1]
    assert not talks.all("#responses .group:first-child tbody tr:nth-child(2) .talk-lanes")  # one sample
    calm(talks)


def test_only_what_the_policy_wrote_has_the_colour_of_its_turns_advantage(talks):
    talks.until(lambda: talks.all("#responses .talk"))
    first = "#responses .group:first-child tbody tr:nth-child(1) .talk > .tree > "
    assert len(talks.all(first + ".own > .say-text.tinted.good")) == 2  # advantages 0.9 and 1.2
    assert len(talks.all(first + ".own .call-name.tinted.bad")) == 1  # -0.3
    assert not talks.all("#responses .other .tinted") and not talks.all("#responses .call-result.tinted")
    shares = talks.js(
        "return [...document.querySelector('#responses .talk-bar').children].map((e) => +e.style.flexGrow)"
    )
    assert sum(shares) == pytest.approx(1, abs=0.02) and len(shares) > 3
    assert chart(talks, "waits", "p.lines.map((line) => line.label)") == ["generation", "tools", "slots"]
    assert chart(talks, "ended", "p.lines.map((line) => line.label)") == ["done", "time_limit"]


def test_the_tokens_of_each_turn_are_coloured_and_those_of_others_are_not_there(talks):
    talks.until(lambda: talks.all("#responses .talk"))
    talks.click(".colors button[data-value=ratio]")
    own = "#responses .group:first-child tbody tr:nth-child(1) .talk > .tree > .own"
    turns = talks.js(
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.querySelectorAll('.token.less').length)", own
    )
    assert turns == [34, 15, 11]
    assert talks.texts(f"{own}:nth-child(4) .token")[0] == " t46"
    assert "ratio0.368" in talks.js("showToken(document.querySelector('.talk .token')); return tooltip.textContent")
    talks.click(".colors button[data-value=advantage]")
    calm(talks)


def test_branches_that_are_not_drawn_are_counted(browser, tmp_path):
    run = make_conversations(tmp_path / "run", steps=1, groups=1)
    lines = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    lines[0]["branches"] *= 10
    (run / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    show(browser, tmp_path, run)
    browser.until(lambda: browser.all("#responses .talk"))
    assert len(browser.all("#responses .branch")) == 16
    head = browser.texts("#responses .talk-head")[0]
    assert "21 samples" in head and "33 turns" in head  # with those that are not drawn
    assert browser.texts("#responses .talk .gap") == ["and 4 more branches"]
    calm(browser)


def test_hostile_text_of_conversations_stays_text(browser, tmp_path):
    run = make_conversations(tmp_path / "run", steps=1, groups=1)
    line = json.loads((run / "completions.jsonl").read_text().splitlines()[0])
    for text in HOSTILE:
        call = {"type": "function", "function": {"name": text, "arguments": {text[:50]: text}}}
        messages = [
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "content": text},
            {"role": text, "content": text},
        ]
        record = dict(messages=messages, turns=line["dialogue"]["turns"][:1], ended=text, cause=text) | dict(
            rewards={text: 1.0}
        )
        branch = line["branches"][0] | {"dialogue": record, "prompt": [{"role": text, "content": text}]}
        append(run / "completions.jsonl", line | {"step": 2, "dialogue": record, "branches": [branch]})
    show(browser, tmp_path, run)
    browser.until(lambda: browser.all("#responses .talk"))
    while browser.all("#responses .more"):
        browser.click("#responses .more")
    shown = "".join(browser.texts("#responses .talk"))
    assert all(text in shown for text in HOSTILE[:3]) and "\\u202eevil" in shown
    assert not browser.all("#app script, #app img, #app b b")
    assert browser.js("return document.documentElement.scrollWidth <= window.innerWidth")
    calm(browser)


def test_the_security_policy_blocks_other_scripts_and_every_request(browser, tmp_path):
    show(browser, tmp_path, make_run(tmp_path / "run", steps=1, groups=1))
    browser.js(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s)"
    )
    browser.js("const i = document.createElement('img'); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i)")
    assert browser.js("return window.hacked") is None
    browser.until(lambda: browser.js("return performance.now() > 0"))
    assert any("Content Security Policy" in error for error in browser.errors())


@pytest.fixture(scope="module")
def twins(browser, tmp_path_factory):
    """Two runs of one name with the same metrics, evaluated twice; the second one has other responses."""
    folder = tmp_path_factory.mktemp("twins")
    runs = [
        make_run(folder / where / "twin", steps=4, groups=3, seed=seed, evaluate=False)
        for seed, where in enumerate(("new", "old"))
    ]
    rows = (runs[0] / "metrics.jsonl").read_text().splitlines()
    for run in runs:
        (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        for step, share in ((0, 0.2), (4, 0.9)):
            append(run / "metrics.jsonl", {"step": step, "eval/pass@1": share})
    show(browser, folder, *runs)
    return browser


def test_runs_of_one_name_have_labels_and_curves_of_their_own(twins):
    assert twins.texts(".toolbar .legend button") == ["new/twin", "old/twin"]
    labels = chart(twins, "reward", "p.lines.filter((line) => line.label).map((line) => line.label)")
    assert labels == ["new/twin", "old/twin"]
    calm(twins)


def test_two_evaluations_come_after_the_curves(twins):
    assert chart_order(twins)[0] == "chart-reward" and chart_order(twins)[-1] == "chart-evaluation"


def test_the_responses_of_each_run_are_chosen_by_its_label(twins):
    first = twins.texts(".group:first-of-type tbody")
    twins.click("#responses .filters button", "old/twin")
    twins.until(lambda: twins.texts(".group:first-of-type tbody") != first)
    assert len(twins.all(".group")) == 3
    calm(twins)


def test_an_alarm_is_on_the_plot_of_its_metric_and_a_healthy_comparison_says_so(twins):
    assert twins.texts("#chart-solved .badge") == ["warning"] and chart(
        twins, "solved", "p.card.classList.contains('alarmed')"
    )
    assert twins.texts("#chart-mismatch .badge") == ["healthy"]
    assert twins.texts("#chart-mismatch .note")[0].startswith("Healthy: trainer and engine agree.")
    assert twins.all("#chart-reward .badge[hidden]")
    calm(twins)


def test_tokens_on_which_trainer_and_engine_agree_are_counted_in_words(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=1, groups=1)
    rows = [json.loads(line) for line in (run / "tokens.jsonl").read_text().splitlines()]
    (run / "tokens.jsonl").unlink()
    for row in rows:
        append(run / "tokens.jsonl", row | {"trainer_logprobs": [value + 1e-5 for value in row["rollout_logprobs"]]})
    show(browser, tmp_path, run)
    browser.click(".colors button[data-value=ratio]")
    count = sum(len(row["tokens"]) for row in rows)
    assert browser.texts(".verdict") == [
        f"Trainer and vLLM agree: of {count} tokens none differs by more than 0.1%, so none has a colour."
    ]
    calm(browser)


def test_a_run_of_one_step_shows_its_points(browser, tmp_path):
    show(browser, tmp_path, make_run(tmp_path / "run", steps=1, groups=1, evaluate=False))
    assert chart(browser, "entropy", "p.uplot.series[1].points.filter(p.uplot, 1)") == [0]
    calm(browser)


@pytest.mark.full
def test_the_page_fits_a_narrow_screen(browser, tmp_path):
    browser.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        show(browser, tmp_path, make_run(tmp_path / "run", steps=3, length=80))
        assert browser.js("return document.documentElement.scrollWidth") == 400
        assert chart(browser, "reward", "p.area.clientWidth") < 400
        browser.js("document.getElementById('speed').scrollIntoView()")
        places = browser.js(
            "return [...document.querySelectorAll('.pinned nav a, .zoom button')].map((e) => { const r = "
            "e.getBoundingClientRect();return [r.left, r.right, r.top, r.bottom]; })"
        )
        assert len(places) == 8
        assert all(0 <= left < right <= 400 and 0 <= top < bottom <= 140 for left, right, top, bottom in places)
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    calm(browser)
