"use strict";
// A conversation as a tree: the policy's turns, tool calls with results, what others wrote, and branches where they leave it.

const WAITS = [["generation", "gen"], ["slots", "slot"], ["tools", "tool"]];
const SHORT_ITEMS = 4; // items of a conversation that is shown whole

const isShort = ({ items, branches }) => items.length <= SHORT_ITEMS && !branches && !items.some((item) => item.branches || item.text?.length > 300);

/** The nodes of a response's conversation: its numbers, its time, and its tree. */
function conversationNodes(response, mode) {
  const talk = response.conversation, tokens = coloursTokens(mode, response.tokens) ? response.tokens : null;
  return [talkHead(response), talkTime(talk), talkTree(talk, { mode, response, tokens })];
}

/** [generation, slots, tools] in seconds of a turn. */
const secondsOf = (turn) => [Math.max(0, (turn.generated || 0) - (turn.queued || 0)), turn.queued || 0, turn.answered || 0];

/** Every turn of a conversation and of its branches. */
const allTurns = (talk) => [...talk.turns, ...branchesOf(talk).flatMap(allTurns)];
const branchesOf = (talk) => [...(talk.branches || []), ...talk.items.flatMap((item) => item.branches || [])];

/** [start, end] of turns in seconds after the conversation's beginning; null if it is not recorded. */
const timeOf = (turns) => turns.length > 0 && turns.every((turn) => isNumber(turn.at)) ? [Math.min(...turns.map((turn) => turn.at)), Math.max(...turns.map((turn) => turn.at + (turn.generated || 0) + (turn.answered || 0)))] : null;

function talkHead(response) {
  const talk = response.conversation, turns = allTurns(talk), sum = (name) => turns.reduce((total, turn) => total + (turn[name] || 0), 0);
  const calls = talk.items.reduce((count, item) => count + (item.calls?.length || 0), 0), seconds = timeOf(turns)?.[1] ?? sum("generated") + sum("answered");
  const ended = talk.ended && el("span", { class: `badge ${{ done: "fine", failed: "error" }[talk.ended] || "warning"}` }, talk.ended.replaceAll("_", " "));
  const own = response.masked ? "truncated, so none trained" : response.advantage === 0 ? "trained, at advantage 0" : "trained";
  return el("p", { class: "meta talk-head" }, el("span", {}, plural(talk.all_turns, "turn")), calls > 0 && el("span", {}, plural(calls, "tool call")),
    talk.samples > 1 && el("span", {}, plural(talk.samples, "sample")),
    el("span", { class: "own-key" }, `${plural(talk.tokens, "token")} ${own}`), talk.after > 0 && el("span", { class: "other-key" }, `${plural(talk.after, "context token")}, not trained`),
    seconds > 0 && el("span", {}, duration(seconds)), ended, talk.cause && el("span", { class: "warn" }, talk.cause.replaceAll("_", " ")),
    talk.retries > 0 && el("span", { class: "warn" }, talk.retries === 1 ? "retried once" : `retried ${talk.retries} times`));
}

/** The seconds of a conversation, and their sums: a bar, turn by turn, or with branches a bar per sample on one time axis. */
function talkTime(talk) {
  const spent = allTurns(talk).map(secondsOf), total = spent.flat().reduce((a, b) => a + b, 0);
  if (!total) return "";
  const sums = WAITS.map(([label, name], kind) => [label, name, spent.reduce((sum, turn) => sum + turn[kind], 0)]).filter(([, , seconds]) => seconds >= 0.001);
  const label = { role: "img", "aria-label": sums.map(([name, , seconds]) => `${name} ${duration(seconds)}`).join(", ") };
  const bar = () => el("div", { class: "talk-bar", ...label }, spent.map((turn, i) => turn.map((seconds, kind) => seconds / total >= 0.002 &&
    el("i", { class: WAITS[kind][1], style: { "flex-grow": seconds / total }, title: `${i < talk.turns.length ? `turn ${i + 1}` : "branch"}: ${WAITS[kind][0]} ${duration(seconds)}` }))));
  return el("div", { class: "talk-time" }, branchesOf(talk).length > 0 && timeOf(allTurns(talk)) ? el("div", { class: "talk-lanes", ...label }, talkLanes(talk)) : bar(),
    el("p", { class: "meta" }, sums.map(([name, kind, seconds]) => el("span", { class: `key ${kind}` }, `${name} ${duration(seconds)}`))));
}

/** A bar per sample, in the order in which they began; what ran at once is one above the other. */
function talkLanes(talk) {
  const samples = [talk, ...branchesOf(talk)].filter((sample) => sample.turns.length > 0).sort((a, b) => timeOf(a.turns)[0] - timeOf(b.turns)[0] || (a.number || 0) - (b.number || 0)), whole = timeOf(allTurns(talk))[1] || 1;
  return samples.flatMap((sample) => {
    const name = sample.role || (sample === talk ? "main" : `branch ${sample.number}`);
    const parts = sample.turns.flatMap((turn, i) => {
      const [generation, slots, tools] = secondsOf(turn);
      return [[1, turn.at, slots], [0, turn.at + slots, generation], [2, turn.at + slots + generation, tools]].map(([kind, at, seconds]) => seconds / whole >= 0.0005 &&
        el("i", { class: WAITS[kind][1], style: { left: `${100 * at / whole}%`, width: `${100 * seconds / whole}%` }, title: `${name}, turn ${i + 1}: ${WAITS[kind][0]} ${duration(seconds)}` }));
    });
    return [el("span", {}, name), el("div", { class: "talk-lane" }, parts)];
  });
}

/** The list of a conversation's items. `shown` has the mode of colours, the response, and its tokens if they are coloured. */
function talkTree(talk, shown) {
  const list = el("ol", { class: "tree" }, branchNodes(talk.branches, shown));
  for (const item of talk.items) list.append(item.turns ? turnNode(talk, item, shown) : otherNode(item), ...branchNodes(item.branches, shown));
  if (talk.more_branches) list.append(el("li", { class: "gap" }, el("div", { class: "say-head" }, `and ${talk.more_branches} more ${talk.more_branches === 1 ? "branch" : "branches"}`)));
  const rewards = Object.entries(talk.rewards).filter(([, value]) => isNumber(value));
  if (talk.ended && !(talk.ended === "done" && talk !== shown.response.conversation)) list.append(el("li", { class: "end" }, el("div", { class: "say-head" }, el("b", {}, `ended: ${talk.ended.replaceAll("_", " ")}`), rewards.map(([name, value]) => el("span", {}, `${name} ${signed(value)}`)))));
  return list;
}

/** A message that the policy did not write. */
function otherNode(item) {
  if (item.left_out) return el("li", { class: "gap" }, el("div", { class: "say-head" }, `${plural(item.left_out, "message")} left out`,
    item.branches_left_out > 0 && el("span", {}, `with ${item.branches_left_out} of the branches`)));
  return el("li", { class: "say other" }, el("div", { class: "say-head" }, el("b", {}, item.role || "?"), el("span", {}, "not trained")), el("div", { class: "say-text", dir: "auto" }, item.text), callNodes(item, null, { class: "", style: {} }));
}

/** A message of the policy: its turn with tokens, seconds and reward, its text, and its tool calls. */
function turnNode(talk, item, { mode, response, tokens }) {
  const turns = item.turns.map((place) => talk.turns[place]), last = turns.at(-1);
  const heads = item.turns.map((place) => turnHead(talk.turns[place], place));
  const heat = responseHeat(mode, isNumber(last.advantage) ? { ...response, advantage: last.advantage } : response);
  const within = tokens && turns.every((turn) => turn.start + turn.tokens <= tokens.text.length) && talk === response.conversation;
  // the calls of this message could not be read, so the message has none of its text
  const unparsed = item.calls ? "" : talk.turns.length === 1 && talk === response.conversation ? response.text : "(a tool call that could not be read)";
  const text = within ? turns.flatMap((turn) => tokenSpans(tokens, mode, turn.start, turn.start + turn.tokens)) : item.text || unparsed;
  const tint = heat && !within && !response.masked ? { class: ` tinted ${heat[0]}`, style: { "--heat": heat[1] } } : { class: "", style: {} };
  return el("li", { class: "say own" }, heads, (within || item.text || unparsed) && el("div", { ...tint, class: `say-text${tint.class}`, dir: "auto" }, text), callNodes(item, last, tint),
    last.cut && el("span", { class: "marker cut" }, "cut at the limit"));
}

function turnHead(turn, place) {
  const [generation, slots] = secondsOf(turn);
  return el("div", { class: "say-head" }, el("b", {}, `turn ${place + 1}`), el("span", {}, plural(turn.tokens, "token")),
    generation > 0 && el("span", { class: "key gen" }, duration(generation)), slots >= 0.001 && el("span", { class: "key slot" }, `${duration(slots)} for a slot`),
    isNumber(turn.reward) && el("span", { class: turn.reward > 0 ? "plus" : turn.reward < 0 ? "minus" : "" }, `reward ${signed(turn.reward)}`),
    isNumber(turn.advantage) && el("span", { class: turn.advantage > 0 ? "plus" : turn.advantage < 0 ? "minus" : "" }, `advantage ${signed(turn.advantage)}`));
}

/** The tool calls of a message with their results; `tint` colours what the policy wrote. `turn` has the seconds in which all of them were answered. */
function callNodes(item, turn, tint) {
  if (!item.calls) return turn?.answered >= 0.01 && el("div", { class: "say-head after" }, el("span", { class: "key tool" }, `answered in ${duration(turn.answered)}`));
  const nodes = item.calls.map((call) => el("div", { class: `call${call.failed ? " failed" : ""}` },
    el("div", { ...tint, class: `call-name${tint.class}` }, el("b", {}, call.name || "?"), el("span", { dir: "auto" }, `(${call.arguments})`)),
    call.result === undefined ? el("div", { class: "call-result quiet" }, "no result") : el("div", { class: "call-result", dir: "auto" }, call.result)));
  return [nodes, turn && el("div", { class: "say-head after" }, turn.answered > 0 && el("span", { class: "key tool" }, `answered in ${duration(turn.answered)}`),
    turn.failures > 0 && el("span", { class: "minus" }, `${turn.failures} failed`), turn.shortened > 0 && el("span", {}, `${turn.shortened} shortened`),
    turn.after > 0 && el("span", {}, `${plural(turn.after, "context token")}, not trained`))];
}

/** The other samples of a trajectory that leave it here. */
function branchNodes(branches, shown) {
  return (branches || []).map((branch, i) => {
    const turns = allTurns(branch), tokens = turns.reduce((sum, turn) => sum + turn.tokens, 0), time = timeOf(turns);
    const summary = el("summary", {}, el("b", {}, branch.role ? `branch ${branch.number}: ${branch.role}` : `branch ${branch.number}`), el("span", {}, plural(turns.length, "turn")), el("span", { class: "own-key" }, `${plural(tokens, "token")} trained`),
      isNumber(branch.prompt_tokens) && el("span", {}, `after ${plural(branch.prompt_tokens, "token")} of context`),
      time && el("span", {}, `from ${duration(time[0])} to ${duration(time[1])}`));
    return el("li", { class: "branch" }, el("details", { open: i < 3 }, summary, talkTree(branch, { ...shown, tokens: null })));
  });
}
