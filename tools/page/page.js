"use strict";
// The page of a run. What is shown is in the address (#tab=rollouts&step=10&q=apple), so a view can be linked to.
// Text of prompts and responses goes into the page as text nodes only.
const data = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);
const COLOURS = ["#2f6fde", "#d9662b", "#2a9d6f", "#8e5bd0", "#c23b6e", "#8a7a13", "#3aa0b5", "#6b7280"];
const TABS = {curves: "Curves", rollouts: "Rollouts", flags: data.runs.length > 1 ? "Flags that differ" : "Flags"};
const CHARTS = [                                        // title, metrics, further options
  ["Reward", /^critic\/(rewards|score)\/mean$/],
  ["Validation", /^val-core\//],
  ["Response length, tokens", /^response_length\/(mean|max|min)$/],
  ["Entropy, nats", /^actor\/entropy$/],
  ["KL, nats", /^actor\/(ppo_kl|kl_loss)$/],
  ["Clipped tokens, share", /^actor\/pg_clipfrac(_lower)?$/],
  ["Gradient norm", /^(actor|critic)\/grad_norm$/],
  ["Learning rate", /^(actor|critic)\/lr$/],
  ["Engine against trainer, difference of probabilities", /^training\/rollout_probs_diff_(mean|std)$/],
  ["Policy and value loss", /^(actor\/pg_loss|critic\/vf_loss)$/],
  ["Critic", /^critic\/(values\/mean|returns\/mean|vf_explained_var)$/],
  ["Shares: constant groups, truncated responses, lost rewards",
   /^(reward\/(constant_group|error|timeout)_frac|rollout\/truncated_frac)$/],
  ["Seconds by phase", /^timing_s\//],
  ["Tokens per second", /^(perf\/throughput|rollout\/tokens_per_s)$/],
  ["Share of the chip's peak FLOP/s", /^perf\/mfu\//],
  ["Memory, GiB", /^perf\/.*memory.*_gb$/],
];
const PAINTS = {                                        // what tokens can be coloured by: value, middle (null: from 0)
  "advantage": [(r, t) => at_(r.token_advantage, t), 0],
  "entropy": [(r, t) => at_(r.entropy, t), null],
  "log-prob, trainer - engine": [(r, t) => difference(r.old_logp, r.rollout_logp, t), 0],
  "ratio": [(r, t) => at_(r.ratio, t), 1],
  "clipped": [(r, t) => at_(r.clipped, t) === null ? null : +r.clipped[t], null],
  "log-prob, trainer - reference": [(r, t) => difference(r.old_logp, r.ref_logp, t), 0],
  "surprise, -log-prob": [(r, t) => at_(r.rollout_logp, t) === null ? null : -r.rollout_logp[t], null],
  "value": [(r, t) => at_(r.value, t), 0],
};
const NUMBERS = {                                       // lines of a token's tooltip
  "advantage": "token_advantage", "entropy": "entropy", "log-prob, engine": "rollout_logp",
  "log-prob, trainer": "old_logp", "log-prob, reference": "ref_logp", "ratio": "ratio", "clipped": "clipped",
  "value": "value", "return": "returns",
};

function at_(values, t) { return values === null || values[t] === null ? null : values[t]; }
function difference(a, b, t) { return at_(a, t) === null || at_(b, t) === null ? null : a[t] - b[t]; }

function show(x) {                                      // a number for people
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  if (x === 0 || Number.isInteger(x) && Math.abs(x) < 1e6) return String(x);
  return Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(1) : String(+x.toPrecision(4));
}

function make(tag, text, name) {                        // an element with text in it
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

// ---------------------------------------------------------------- what is shown, in the address

const DEFAULTS = {tab: "curves", step: "", min: "", max: "", q: "", sort: "", show: "", paint: "advantage"};
let state = {...DEFAULTS};

function go(changes) {
  Object.assign(state, changes);
  const changed = Object.entries(state).filter(([key, value]) => value !== DEFAULTS[key]);
  history.replaceState(null, "", "#" + new URLSearchParams(changed));
  render();
}

function render() {
  for (const tab in TABS) {
    at(tab).hidden = tab !== state.tab;
    at("tab-" + tab).className = tab === state.tab ? "on" : "";
  }
  if (state.tab === "curves") drawCharts();
  if (state.tab === "rollouts") drawRollouts();
}

// ---------------------------------------------------------------- curves

const names = [...new Set(data.runs.flatMap(run => Object.keys(run.metrics)))].sort();
const charts = [];                                      // {plot, box}

function drawCharts() {
  if (charts.length) return;
  for (const [title, pattern] of CHARTS) addChart(title, names.filter(name => pattern.test(name)));
}

function addChart(title, shown) {
  const series = [];
  data.runs.forEach((run, number) => shown.forEach((name, i) => {
    if (run.metrics[name]) series.push({run, name, number, colour: COLOURS[i % COLOURS.length]});
  }));
  if (!series.length) return;
  const box = at("charts").appendChild(make("div", undefined, "chart"));
  box.append(make("h2", title));
  const prefix = shown.length > 1 ? commonPrefix(shown) : shown[0].lastIndexOf("/") + 1;
  const options = {
    width: box.clientWidth - 16, height: 190, cursor: {sync: {key: "step"}, points: {size: 6}},
    scales: {x: {time: false}, y: {range: (_, low, high) => low < high ? uPlot.rangeNum(low, high, 0.1, true)
      : low === null ? [0, 1] : [low - (Math.abs(low) || 1) / 2, low + (Math.abs(low) || 1) / 2]}},
    axes: [{size: 32, values: (_, ticks) => ticks.map(x => Number.isInteger(x) ? x : "")},
           {size: 62, values: (_, ticks) => ticks.map(show)}],
    series: [{label: "step"}, ...series.map(({run, name, number, colour}) => ({
      label: name.slice(prefix) + (data.runs.length > 1 ? " · " + run.name : ""), stroke: colour,
      width: number ? 1.5 : 2, dash: number ? [6, 4] : undefined, spanGaps: true,
      points: {show: run.metrics[name].filter(x => x !== null).length <= 12, size: 5},
      value: (_, x) => show(x),
    }))],
  };
  const plot = new uPlot(options, [data.steps, ...series.map(({run, name}) => run.metrics[name])], box);
  charts.push({plot, box});
}

function commonPrefix(words) {                          // up to the last "/" that all share
  let length = 0;
  while (length < words[0].length && words.every(word => word[length] === words[0][length])) length++;
  return words[0].lastIndexOf("/", length) + 1;
}

// ---------------------------------------------------------------- rollouts

const COLUMNS = [                                       // heading, value, is a number
  ["step", r => r.step, true], ["group", r => r.group, true], ["reward", r => r.reward, true],
  ["adv.", r => r.advantage, true], ["tokens", r => r.response_length, true], ["end", r => r.finish_reason, false],
  ["response", r => r.response, false],
];
const MOST_ROWS = 500;

function chosenRollouts() {
  const min = state.min === "" ? -Infinity : +state.min, max = state.max === "" ? Infinity : +state.max;
  const text = state.q.toLowerCase();
  const found = data.rollouts.filter(r =>
    (state.step === "" || r.step === +state.step) && (r.reward === null ? state.min + state.max === "" :
    r.reward >= min && r.reward <= max) && (r.response + "\n" + data.prompts[r.prompt]).toLowerCase().includes(text));
  const [heading, order] = [state.sort.replace("-", ""), state.sort.startsWith("-") ? -1 : 1];
  const column = COLUMNS.find(([name]) => name === heading);
  if (!column) return found;
  const key = r => column[1](r) ?? -Infinity;
  return found.sort((a, b) => order * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
}

function drawRollouts() {
  for (const id of ["step", "min", "max", "q"]) if (at(id).value !== state[id]) at(id).value = state[id];
  const found = chosenRollouts();
  const cut = found.length > MOST_ROWS ? `, the first ${MOST_ROWS} shown` : "";
  at("count").textContent = data.rollouts.length
    ? `${found.length} of ${data.rollouts.length} responses${cut}${data.left_out}` : "this run has no rollouts on disk";
  const head = make("tr");
  for (const [name, , number] of COLUMNS) {
    const arrow = state.sort === name ? " ▲" : state.sort === "-" + name ? " ▼" : "";
    const cell = head.appendChild(make("th", name + arrow, number ? "number" : ""));
    cell.onclick = () => go({sort: state.sort === "-" + name ? name : "-" + name});
  }
  at("list").querySelector("thead").replaceChildren(head);
  const chosen = data.rollouts.find(r => r.id === state.show) ?? found[0];
  const rows = found.slice(0, MOST_ROWS).map(r => {
    const row = make("tr", undefined, r === chosen ? "on" : "");
    for (const [name, value, number] of COLUMNS)
      row.append(make("td", number ? show(value(r)) : value(r), name === "response" ? "text" : number ? "number" : ""));
    row.onclick = () => go({show: r.id});
    return row;
  });
  const list = at("list");
  list.querySelector("tbody").replaceChildren(...rows);
  const on = list.querySelector("tr.on");               // in sight, without moving the page
  if (on && (on.offsetTop < list.scrollTop + 30 || on.offsetTop + 30 > list.scrollTop + list.clientHeight))
    list.scrollTop = on.offsetTop - list.clientHeight / 2;
  drawDetail(chosen);
}

function drawDetail(chosen) {
  const detail = at("detail");
  if (!chosen) { detail.replaceChildren(make("p", "No response fits.")); return; }
  const group = data.rollouts.filter(r => r.step === chosen.step && r.group === chosen.group);
  const prompt = make("div", data.prompts[chosen.prompt], "prompt");
  const truth = `step ${chosen.step}, group ${chosen.group} of ${chosen.data_source}, ground truth ${chosen.ground_truth}`;
  const paint = make("div");
  paint.id = "paint";
  const select = make("select");
  for (const name in PAINTS) select.append(new Option(name, name, false, name === state.paint));
  select.onchange = () => go({paint: select.value});
  const label = make("label", "tokens coloured by ");
  label.append(select);
  const scale = scaleOf(group);
  paint.append(label, legendOf(scale));
  const cards = make("div");
  cards.id = "group";
  cards.append(...group.map(r => cardOf(r, r === chosen, scale)));
  detail.replaceChildren(make("h2", truth), prompt, paint, cards);
  prompt.scrollTop = prompt.scrollHeight;               // the question stands at the end
}

function scaleOf(group) {                               // one scale for the group: {value, middle, size}
  const [value, middle] = PAINTS[state.paint];
  const sizes = group.flatMap(r => r.texts.map((_, t) => value(r, t))).filter(x => x !== null)
    .map(x => Math.abs(x - (middle ?? 0)));
  return {value, middle, known: sizes.length > 0, size: sizes.reduce((a, b) => Math.max(a, b), 0)};
}

function colourOf({middle, size}, x) {                  // blue above the middle, orange below; purple from 0 up
  const strength = size ? Math.min(Math.abs(x - (middle ?? 0)) / size, 1) * 0.75 : 0;
  const rgb = middle === null ? "142,91,208" : x >= middle ? "47,111,222" : "230,120,30";
  return `rgba(${rgb},${strength.toFixed(3)})`;
}

function legendOf(scale) {
  const legend = make("span");
  legend.id = "scale";
  if (!scale.known) { legend.textContent = "not recorded for this group (its tokens were not trained)"; return legend; }
  const low = scale.middle === null ? 0 : scale.middle - scale.size, high = (scale.middle ?? 0) + scale.size;
  const bar = make("i");
  const stops = [0, 0.25, 0.5, 0.75, 1].map(share => colourOf(scale, low + share * (high - low)));
  bar.style.background = `linear-gradient(90deg, ${stops.join(",")})`;
  legend.append(show(low), bar, show(high));
  return legend;
}

function cardOf(r, on, scale) {
  const card = make("div", undefined, on ? "response on" : "response");
  const title = make("h3", `#${r.index}  reward ${show(r.reward)}  adv. ${show(r.advantage)} `);
  const parts = Object.entries(r.reward_parts).map(([name, value]) => ` · ${name} ${show(value)}`).join("");
  title.append(make("small", `${r.response_length} tokens, ${r.finish_reason}${parts}`));
  title.onclick = () => go({show: r.id});
  const tokens = make("div", undefined, "tokens");
  r.texts.forEach((text, t) => {
    const span = make("span", text === "" ? "·" : text.replaceAll("\n", "⏎\n"));
    const x = scale.value(r, t);
    if (x !== null) span.style.backgroundColor = colourOf(scale, x);
    if (r.trained !== null && !r.trained[t]) span.className = "untrained";
    span.dataset.token = t;
    tokens.append(span);
  });
  tokens.onmouseover = event => event.target.dataset.token && showTip(r, +event.target.dataset.token, event.target);
  tokens.onmouseout = () => { at("tip").hidden = true; };
  card.append(title, tokens);
  return card;
}

function showTip(r, t, span) {
  const table = make("table");
  for (const [name, key] of Object.entries(NUMBERS)) {
    const x = at_(r[key], t);
    if (x === null) continue;
    const row = table.appendChild(make("tr"));
    row.append(make("td", name), make("td", show(x)));
  }
  const tip = at("tip"), box = span.getBoundingClientRect();
  const trained = r.trained === null || r.trained[t] ? "" : ", not trained";
  tip.replaceChildren(make("div", `${JSON.stringify(r.texts[t])}  token ${t}, id ${r.tokens[t]}${trained}`), table);
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = (box.bottom + tip.offsetHeight + 6 < innerHeight ? box.bottom + 4 : box.top - tip.offsetHeight - 4) + "px";
}

// ---------------------------------------------------------------- flags

function drawFlags() {
  const table = at("flags").querySelector("table"), head = table.appendChild(make("tr"));
  head.append(make("th", "flag"), ...data.runs.map(run => make("th", run.name)));
  const flags = [...new Set(data.runs.flatMap(run => Object.keys(run.flags)))];
  const differs = flag => data.runs.some(run => run.flags[flag] !== data.runs[0].flags[flag]);
  for (const flag of [...flags.filter(differs), ...flags.filter(flag => !differs(flag))]) {
    const row = table.appendChild(make("tr", undefined, differs(flag) ? "differs" : ""));
    row.append(make("td", flag), ...data.runs.map(run => make("td", run.flags[flag] ?? "–")));
  }
}

// ---------------------------------------------------------------- once

at("name").textContent = data.runs.map(run => run.name).join(" against ");
at("summary").textContent = data.summary;
for (const [tab, title] of Object.entries(TABS)) {
  const button = at("tabs").appendChild(make("button", title));
  button.id = "tab-" + tab;
  button.onclick = () => go({tab});
}
at("warnings").append(...data.warnings.map(text => make("li", text)));
at("names").append(...names.map(name => new Option(name)));
at("more").onchange = () => names.includes(at("more").value) && addChart(at("more").value, [at("more").value]);
at("step").append(new Option("all", ""), ...[...new Set(data.rollouts.map(r => r.step))].map(s => new Option(s, s)));
for (const id of ["step", "min", "max", "q"]) at(id).oninput = () => go({[id]: at(id).value, show: ""});
at("filters").onsubmit = event => event.preventDefault();
addEventListener("resize", () => charts.forEach(({plot, box}) => plot.setSize({width: box.clientWidth - 16, height: 190})));
addEventListener("hashchange", start);

function start() {
  state = {...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1)))};
  if (!(state.tab in TABS)) state.tab = "curves";
  if (!(state.paint in PAINTS)) state.paint = "advantage";
  render();
}

drawFlags();
start();
