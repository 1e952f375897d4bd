"use strict";
// Colours of responses and tokens, their legend, and the tooltip of a token.

const COLORS = [
  ["none", "none", "Plain text."],
  ["advantage", "advantage", "Green responses (or tokens, if logged with advantages of their own) are made more likely, red ones less likely."],
  ["ratio", "trainer / vLLM", "How much more (blue) or less (orange) likely the trainer finds a token than vLLM did."],
  ["entropy", "entropy", "Where the policy was undecided: its entropy before each token."],
  ["surprise", "surprise", "How unlikely a sampled token was to vLLM."],
  ["cut", "truncation", "Responses that reached the length limit before their end."],
];
const SCALES = { ratio: ["≤ 0.9", "1", "≥ 1.1"], entropy: ["0", "1", "≥ 2 nats"], surprise: ["likely", "", "p ≤ 1%"], advantage: ["≤ −2", "0", "≥ 2"] };
const BY_TOKEN = new Set(["ratio", "entropy", "surprise"]);

/** Whether a mode colours each token of a response: its numbers are logged. */
const coloursTokens = (mode, tokens) => Boolean(tokens && (BY_TOKEN.has(mode) || (mode === "advantage" && tokens.advantage)));

/** [class, strength from 0 to 100] of a token, or null for no colour. */
function tokenHeat(mode, tokens, i) {
  const difference = tokens.difference[i], entropy = tokens.entropy[i], engine = tokens.engine[i];
  if (mode === "ratio" && isNumber(difference)) return [difference > 0 ? "more" : "less", Math.min(1, Math.abs(difference) / 0.1) * 75];
  if (mode === "entropy" && isNumber(entropy)) return ["heat", Math.min(1, entropy / 2) * 80];
  if (mode === "advantage" && tokens.advantage?.[i]) return [tokens.advantage[i] > 0 ? "good" : "bad", Math.min(1, Math.abs(tokens.advantage[i]) / 2) * 60];
  if (mode === "surprise" && isNumber(engine)) return ["heat", Math.min(1, -engine / 4.6) * 80];
  return null;
}

/** [class, strength] of a whole response. */
function responseHeat(mode, response) {
  if (mode === "advantage" && isNumber(response.advantage)) return [response.advantage > 0 ? "good" : "bad", Math.min(1, Math.abs(response.advantage) / 2) * 45];
  if (mode === "cut" && response.cut) return ["cut", 30];
  return null;
}

/** The tokens [start, stop) of a response in the chosen colours. */
function tokenSpans(tokens, mode, start, stop) {
  return tokens.text.slice(start, stop).map((text, i) => {
    const hot = tokenHeat(mode, tokens, start + i);
    return el("span", { class: `token${hot ? ` ${hot[0]}` : ""}`, style: hot ? { "--heat": hot[1] } : {}, "data-i": start + i }, text);
  });
}

/** The text of a response in the chosen colours. */
function responseText(response, mode) {
  const heat = responseHeat(mode, response), tokens = response.tokens;
  const byToken = coloursTokens(mode, tokens), talk = response.conversation;
  const box = el("div", { class: `text${heat && !talk && !byToken ? ` tinted ${heat[0]}` : ""}`, dir: "auto", style: heat && !byToken ? { "--heat": heat[1] } : {} });
  if (byToken) {
    box.tabIndex = 0;
    box.tokens = tokens;
    box.addEventListener("keydown", moveToken);
  }
  if (talk) {
    box.classList.add("talk");
    box.append(...conversationNodes(response, mode));
  } else if (byToken) {
    box.append(...tokenSpans(tokens, mode, 0, tokens.text.length));
    if (tokens.left_out) box.append(el("span", { class: "marker" }, `${tokens.left_out} tokens left out`));
  } else if (response.text) {
    box.append(response.text);
  } else {
    box.append(el("span", { class: "quiet" }, "(empty response)"));
  }
  if (response.cut) box.append(el("span", { class: "marker cut" }, "cut at the limit"));
  return box;
}

function colorLegend(mode, groups) {
  const [, , text] = COLORS.find(([name]) => name === mode), scale = SCALES[mode];
  return [scale && el("span", { class: `scale ${mode}` }, scale.map((label) => el("span", {}, label))), el("span", { class: "quiet" }, text),
    mode === "ratio" && agreement(groups)];
}

/** Say in words how far trainer and vLLM are apart: where they agree, no token has a colour. */
function agreement(groups) {
  const apart = groups.flatMap((group) => group.responses).flatMap(({ tokens }) => tokens?.difference || []).filter(isNumber).map(Math.abs);
  if (!apart.length) return null;
  const most = apart.reduce((a, b) => Math.max(a, b)), far = apart.filter((d) => d >= 0.1).length, text = percent(Math.expm1(most));
  const words = most < 0.01 ? `Trainer and vLLM agree: of ${plural(apart.length, "token")} none differs by more than ${most < 5e-4 ? "0.1%" : text}, so none has a colour.`
    : `${plural(far, "token")} of ${apart.length.toLocaleString("en-US")} differ by 10% or more; the largest difference is ${text}.`;
  return el("b", { class: "verdict" }, words);
}

const tooltip = el("div", { class: "tooltip", role: "tooltip", hidden: true });

function showToken(span) {
  const tokens = span.closest(".text").tokens, i = Number(span.dataset.i);
  const chance = (value) => (isNumber(value) ? percent(Math.exp(value)) : NONE);
  const engine = tokens.engine[i], difference = tokens.difference[i];
  const rows = [["token", JSON.stringify(tokens.text[i])], ["vLLM", chance(engine)],
    ["trainer", chance(isNumber(difference) ? engine + difference : null)],
    ["ratio", isNumber(difference) ? Math.exp(difference).toFixed(3) : NONE],
    ...(isNumber(tokens.advantage?.[i]) ? [["advantage", signed(tokens.advantage[i])]] : []),
    ["entropy", isNumber(tokens.entropy[i]) ? `${short(tokens.entropy[i], 3)} nats` : NONE]];
  tooltip.replaceChildren(...rows.flatMap(([name, text]) => [el("span", {}, name), el("b", {}, text)]));
  tooltip.hidden = false;
  const box = span.getClientRects()[0] || span.getBoundingClientRect(), own = tooltip.getBoundingClientRect();
  const left = Math.max(8, Math.min(window.innerWidth - own.width - 8, box.left));
  const above = box.top - own.height - 6;
  tooltip.style.left = `${left}px`;
  tooltip.style.top = `${above > 4 ? above : box.bottom + 6}px`;
}

function moveToken(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], box = event.currentTarget;
  if (event.key === "Escape") tooltip.hidden = true;
  if (!step) return;
  event.preventDefault();
  const spans = [...box.querySelectorAll(".token")], here = spans.findIndex((span) => span.classList.contains("current"));
  const next = spans[Math.min(spans.length - 1, Math.max(0, here + step))];
  spans[here]?.classList.remove("current");
  next?.classList.add("current");
  if (next) showToken(next);
}

document.addEventListener("mouseover", (event) => {
  const span = event.target.closest?.(".token");
  if (span) showToken(span);
  else tooltip.hidden = true;
});
document.addEventListener("scroll", () => (tooltip.hidden = true), { passive: true });
