"use strict";
// The charts of the page: what each one shows, in which unit, and what it means.
//
// `series`: [metric, label]; a metric that ends with * stands for every metric with that beginning and ending.
// `evaluation`: evaluation metrics, drawn as points.
// `log`: the chart can be logarithmic. `alarm`: alarms of this metric are marked in the plot and on the card, above `limit` if the chart has
// one. `zero`: the axis begins at 0. `some`: series that are 0 in every step are
// left out. `minus` is subtracted from every value. `healthy`: said when the check of the alarm passed.

const LEARNING = [
  { id: "reward", title: "Reward", unit: "reward", hero: true, series: [["reward", "reward"]], alarm: "reward",
    text: "Mean reward of each step." },
  { id: "evaluation", title: "Evaluation", unit: "auto", evaluation: true, points: true, series: [], alarm: "evaluation",
    text: "Held-out prompts, or the loss on held-out rows, before the first step and at intervals." },
  { id: "tasks", title: "Tasks", unit: "reward", series: [["tasks/*/reward", "*"]],
    text: "Mean reward of each task's responses." },
  { id: "functions", title: "Reward functions", unit: "reward", series: [["rewards/*/mean", "*"]], atLeast: 2, alarm: "rewards/*/exceptions",
    text: "Mean of each function before its weight." },
  { id: "solved", title: "Groups without a difference", unit: "share", zero: true, alarm: "frac_reward_zero_std", limit: 0.5, series: [["frac_reward_zero_std", "groups"], ["tasks/*/frac_reward_zero_std", "*"]],
    text: "Share of groups whose rewards are all equal: they have no gradient." },
  { id: "pairs", title: "Right order of pairs", unit: "share", zero: true, series: [["rewards/accuracy", "accuracy"]],
    text: "Share of pairs whose chosen response has the higher reward." },
  { id: "margin", title: "Margin of pairs", unit: "reward", zero: true, series: [["rewards/margin", "margin"]],
    text: "Reward of the chosen response minus that of the rejected one." },
  { id: "length", title: "Response length", unit: "tokens", log: true, series: [["completions/mean_length", "mean"], ["tasks/*/completions/mean_length", "*"]],
    text: "Mean tokens of a response." },
  { id: "cut", title: "Truncated responses", unit: "share", zero: true, alarm: "completions/clipped_ratio", limit: 0.5, series: [["completions/clipped_ratio", "truncated"], ["tasks/*/completions/clipped_ratio", "*"]],
    text: "Share of responses that reached rollout.max_completion_length." },
  { id: "ended", title: "How conversations ended", unit: "share", zero: true, some: true, series: [["multi_turn/ended/*", "*"]],
    text: "Share of the step's conversations by the reason of their end." },
];

const HEALTH = [
  { id: "entropy", title: "Entropy", unit: "nats", zero: true, alarm: "entropy", log: true, series: [["entropy", "entropy"]],
    text: "Of the policy, per token. A fall to 0 at a low reward is a collapse." },
  { id: "mismatch", title: "Engine mismatch", unit: "factor", log: true, minus: 1, zero: true, alarm: "mismatch/alarms", healthy: "trainer and engine agree",
    series: [["token_mult_prob_error", "token_mult_prob_error − 1"]], text: "How far the probabilities of vLLM and trainer are apart. 0 means that they agree." },
  { id: "kl", title: "KL to the reference", unit: "nats", log: true, series: [["kl", "kl"]], text: "The KL term that algorithm.beta multiplies." },
  { id: "grad", title: "Gradient norm", unit: "", zero: true, alarm: "grad_norm", log: true, series: [["grad_norm", "grad_norm"]],
    text: "Before clipping to train.max_grad_norm." },
  { id: "loss", title: "Loss", unit: "", alarm: ["train/skipped_steps", "loss"], series: [["loss", "loss"]], text: "Of GRPO near 0 by construction: watch the reward instead. Of sft, dpo and reward it is what falls." },
];

const SPEED = [
  { id: "tokens", title: "Tokens per second", unit: "tokens/s", zero: true, series: [["tokens_per_second", "tokens/s"]],
    text: "Prompts and responses of a step over its seconds." },
  { id: "waits", title: "What conversations wait for", unit: "share", zero: true, series: [["idle/generation", "generation"], ["idle/tools", "tools"], ["idle/slots", "slots"]],
    text: "Shares of the conversations' time. Tools include schedulers and environments; slots are those of the servers." },
  { id: "memory", title: "Peak memory", unit: "GiB", zero: true, series: [["memory_gb", "rank 0"], ["memory/resident_gb", "resident"]],
    text: "GPU memory of rank 0; resident memory without a GPU." },
];

const PHASES = [["time/generate", "generate"], ["time/reward", "reward"], ["time/logprobs", "logprobs"], ["time/train", "train"], ["time/sync", "sync"]];

const MOST = 16; // curves of a chart for one pattern; the others are among the further metrics

/** Return the series of a chart that exist in any of the runs: [metric, label]. */
function seriesOf(chart, runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run[chart.evaluation ? "evaluations" : "training"].metrics)));
  if (chart.evaluation) return evaluationSeries(names);
  const found = chart.series.flatMap(([metric, label]) => {
    if (!metric.includes("*")) return names.has(metric) ? [[metric, label]] : [];
    const [before, after] = metric.split("*");
    return [...names].filter((name) => name.startsWith(before) && name.endsWith(after) && (!chart.some || runs.some((run) => run.training.metrics[name]?.some((value) => value > 0))))
      .slice(0, MOST).map((name) => [name, name.slice(before.length, name.length - after.length)]);
  });
  return found.length >= (chart.atLeast || 1) ? found : [];
}

/** The evaluation metrics worth a chart: pass@1, else reward, else loss, of every held-out set. */
function evaluationSeries(names) {
  for (const ending of ["pass@1", "reward", "loss"]) {
    const found = [...names].filter((name) => name.endsWith(`/${ending}`));
    if (found.length) return found.map((name) => [name, name.replace(/^eval\//, "")]);
  }
  return [];
}

const FEW = 3; // evaluations below which their chart comes last

/** The charts of a section: an evaluation with few points makes room for the curves. */
function ordered(charts, runs) {
  const few = (chart) => chart.evaluation && runs.every((run) => run.evaluations.step.length < FEW);
  return [...charts.filter((chart) => !few(chart)), ...charts.filter(few)];
}

/** Metrics that no chart above shows. */
function otherMetrics(runs) {
  const shown = new Set([...LEARNING, ...HEALTH, ...SPEED].flatMap((chart) => seriesOf(chart, runs).map(([metric]) => metric)));
  const all = new Set(runs.flatMap((run) => Object.keys(run.training.metrics)));
  return [...all].filter((name) => !shown.has(name)).sort();
}
