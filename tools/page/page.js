"use strict";
// The page of runs. What is shown is in the address (#tab=rollouts&step=10&q=apple), so a view can be linked to.
// Text of prompts and responses goes into the page as text nodes only.
const at = id => document.getElementById(id);
let data = JSON.parse(at("data").textContent);
at("data").remove();
const TABS = {curves: "Curves", rollouts: "Rollouts", flags: "Flags"};
const COLOURS = {                                       // Okabe and Ito's, which colour-blind people tell apart
  light: ["#0072b2", "#d55e00", "#009e73", "#b8609a", "#a87900", "#3a9bd0", "#6b4fa0", "#555e6b"],
  dark: ["#56b4e9", "#ff8a3d", "#2fc79a", "#e39ac8", "#e6c229", "#8fd3ff", "#b39ddb", "#b5bdc9"],
};
const TIMES = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 36000, 72000, 180000, 360000];     // seconds
const DASHES = [undefined, [7, 4], [2, 3], [10, 3, 2, 3]];
const CHARTS = [                                        // title, metrics of one run, of several (default: the same)
  ["Validation", /^val-core\//, /^val-core\/.*(greedy|mean@\d+)$/],
  ["Training reward", /^critic\/rewards\/mean$/],
  ["Loss", /^(train|val|distillation)\/loss$/],
  ["Preference accuracy, share of pairs", /^preference\/accuracy$/],
  ["Preferences, rewards and margin", /^preference\/(margin|(chosen|rejected)_reward)$/, /^preference\/margin$/],
  ["Preference pairs of a step", /^preference\/pairs$/],
  ["KL of KTO, nats", /^preference\/kl$/],
  ["Response length, tokens", /^response_length\/(mean|max|min)$/, /^response_length\/mean$/],
  ["Turns and calls of tools, of an episode", /^(num_turns|tool_call_counts)\/mean$|^episode\/tool_errors$/],
  ["Ends of episodes, share", /^episode\/\w+_frac$/],
  ["Entropy, nats", /^actor\/entropy$/],
  ["Engine - trainer, probability of a token", /^training\/rollout_probs_diff_mean$/],
  ["KL of old and current policy, nats", /^actor\/ppo_kl$/],
  ["Clipped tokens, share", /^actor\/pg_clipfrac$/],
  ["Groups whose rewards are all equal, share", /^reward\/constant_group_frac$/],
  ["Rows of the data by pool, share", /^curriculum\/\w+_frac$/, /^curriculum\/learning_frac$/],
  ["Gradient norm", /^(actor|critic)\/grad_norm$/],
  ["Noise of the gradient over its signal, squared", /^signal\/noise_to_signal$/],
  ["Gradient by term of the loss, share", /^signal\/share\/(?!.*_cosine$)/],
  ["Gradient by part of the reward, share", /^signal\/reward_share\/(?!.*_cosine$)/],
  ["Tokens and sequences with a gradient, share", /^signal\/(tokens|sequences)_frac$/],
  ["Effective tokens and sequences, share", /^signal\/effective_(tokens|sequences)_frac$/],
  ["Seconds by phase", /^timing_s\//, /^timing_s\/step$/],
  ["KL to the reference, nats", /^actor\/(kl_loss|reward_kl_penalty)$/],
  ["Truncated responses, lost rewards, share", /^(reward\/(error|timeout)_frac|rollout\/truncated_frac)$/],
  ["Reward functions", /^(critic\/score\/mean|reward\/(?!constant_group|error|timeout).*)$/],
  ["Critic", /^critic\/(values\/mean|returns\/mean|vf_explained_var)$/],
  ["Value loss", /^critic\/vf_loss$/],
  ["Policy loss", /^actor\/pg_loss$/],
  ["Learning rate", /^(actor|critic)\/lr$/],
  ["Tokens per second", /^(perf\/throughput|rollout\/tokens_per_s)$/, /^perf\/throughput$/],
  ["Share of the chip's peak FLOP/s", /^perf\/mfu\//],
  ["Memory, GiB", /^perf\/.*memory.*_gb$/, /^perf\/(cpu_memory_peak|max_memory_reserved)_gb$/],
];
const HEALTHY_UNDER = {                                 // as the table of metrics in the documentation has it
  "reward/constant_group_frac": 0.7, "actor/ppo_kl": 0.05, "actor/pg_clipfrac": 0.2,
  "training/rollout_probs_diff_mean": 0.01, "sync/probe_prob_diff": 0.01, "rollout_corr/k3_kl": 0.01,
  "signal/noise_to_signal": 30,
};
const PAINTS = {                                        // what tokens can be coloured by: value, middle (null: from 0)
  "advantage as used": [(x, t) => x.trained?.[t] ? at_(x.token_advantage, t) : null, 0],
  "entropy": [(x, t) => at_(x.entropy, t), null],
  "log-prob, trainer - engine": [(x, t) => difference(x.old_logp, x.rollout_logp, t), 0],
  "ratio": [(x, t) => at_(x.ratio, t), 1],
  "clipped": [(x, t) => at_(x.clipped, t) === null ? null : +x.clipped[t], null],
  "log-prob, trainer - reference": [(x, t) => difference(x.old_logp, x.ref_logp, t), 0],
  "surprise, -log-prob": [(x, t) => at_(x.rollout_logp, t) === null ? null : -x.rollout_logp[t], null],
  "value": [(x, t) => at_(x.value, t), 0],
};
const NUMBERS = {                                       // lines of a token's tooltip
  "advantage": "token_advantage", "entropy": "entropy", "log-prob, engine": "rollout_logp",
  "log-prob, trainer": "old_logp", "log-prob, reference": "ref_logp", "ratio": "ratio", "clipped": "clipped",
  "value": "value", "return": "returns",
};

function isOwn(x, t) { return !x.mask || x.mask[t]; }   // of episodes: the model wrote it, not a user or a tool
function at_(values, t) { return values?.[t] ?? null; }
function difference(a, b, t) { return at_(a, t) === null || at_(b, t) === null ? null : a[t] - b[t]; }
function isNumber(x) { return typeof x === "number"; }
function mean(values) { return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null; }

function digitsOf(ticks) {                              // as many as tell the numbers of an axis apart
  const known = ticks.filter(isNumber), step = Math.abs(known[1] - known[0]);
  return step ? Math.min(15, Math.max(4, Math.ceil(Math.log10(Math.max(...known.map(Math.abs)) / step)) + 1)) : 4;
}

function show(x, digits = 4) {                          // a number for people
  if (x === null || x === undefined) return "–";
  if (!isNumber(x)) return String(x);
  if (x === 0 || Number.isInteger(x) && Math.abs(x) < 1e6) return String(x);
  return Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(1) : String(+x.toPrecision(digits));
}

function plain(text) {                                  // control characters and those of writing direction, in sight
  return String(text).replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
    c => `⟨${c.charCodeAt().toString(16).padStart(4, "0")}⟩`);
}

function make(tag, text, name) {                        // an element with text in it
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = plain(text);
  if (name) element.className = name;
  return element;
}

function clickable(element, action) {                   // with the mouse, and with Enter
  element.tabIndex = 0;
  element.onclick = action;
  element.onkeydown = event => event.key === "Enter" && action(event);
  return element;
}

function theme() {
  return state.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function colourOfRun(number) { return COLOURS[theme()][number % 8]; }

function swatch(number) {
  const mark = make("i", undefined, "swatch");
  mark.style.background = colourOfRun(number);
  return mark;
}

// ---------------------------------------------------------------- what is shown, in the address

const DEFAULTS = {tab: "curves", theme: "", smooth: "0", x: "step", m: "", hide: "", run: "", kind: "", step: "", min: "",
  max: "", q: "", by: "group", sort: "", show: "", paint: "advantage as used"};
const LONG = 300;                                       // steps of a run whose curves are smoothed at first
const FIELDS = ["smooth", "x", "m", "run", "kind", "step", "min", "max", "q", "by"];
let state = {...DEFAULTS}, wanted = 0;

function go(changes) {
  Object.assign(state, changes);
  const changed = Object.entries(state).filter(([key, value]) => value !== DEFAULTS[key]);
  history.replaceState(null, "", "#" + new URLSearchParams(changed));
  cancelAnimationFrame(wanted);                         // a slider moves faster than charts are drawn
  wanted = requestAnimationFrame(render);
}

function render() {
  document.documentElement.dataset.theme = theme();
  for (const tab in TABS) {
    at(tab).hidden = tab !== state.tab;
    at("tab-" + tab).className = tab === state.tab ? "on" : "";
  }
  for (const id of FIELDS) if (at(id).value !== state[id]) at(id).value = state[id];
  if (state.tab === "curves") { drawHeadline(); drawCharts(); }
  if (state.tab === "rollouts") drawRollouts();
  if (state.tab === "flags") drawFlags();
}

// ---------------------------------------------------------------- headline and curves

let names = [], plots = [];

function valuesOf(run, name) { return (run.metrics[name] ?? []).filter(isNumber); }
function hidden(number) { return state.hide.split(" ").includes(String(number)); }

function drawHeadline() {                               // a run a row: validation before and after, reward, time
  const several = data.runs.length > 1;
  const shown = names.filter(name => CHARTS[0][2].test(name));
  const validated = shown.length ? shown : names.filter(name => CHARTS[0][1].test(name));
  const table = at("headline"), head = make("tr"), prefix = validated.length ? commonPrefix(validated) : 0;
  for (const title of ["run", ...validated.map(name => "validation " + name.slice(prefix)), "training reward", "steps",
    "time", "model"]) head.append(make("th", title));
  const lines = data.runs.map((run, number) => {
    const line = make("tr"), name = make("td"), label = make("label");
    if (several) {
      const box = label.appendChild(make("input"));
      box.type = "checkbox";
      box.checked = !hidden(number);
      box.onchange = () => go({hide: data.runs.map((_, i) => i).filter(i => i === number ? !box.checked : hidden(i)).join(" ")});
      label.append(swatch(number));
    }
    label.append(run.name);
    name.append(label);
    line.append(name, ...validated.map(metric => beforeAfter(valuesOf(run, metric), 1)));
    line.append(beforeAfter(valuesOf(run, "critic/rewards/mean"), 5), make("td", show(run.steps.at(-1))));
    line.append(make("td", duration(run.clock.at(-1))), make("td", run.flags["--model"] ?? "–"));
    return line;
  });
  table.replaceChildren(head, ...lines);
}

function beforeAfter(values, most) {                    // means of the first and the last `most` values
  const n = Math.min(most, Math.ceil(values.length / 2)), cell = make("td");
  if (!values.length) return make("td", "–");
  const [before, after] = [mean(values.slice(0, n)), mean(values.slice(-n))].map(x => +x.toFixed(3));
  if (values.length > 1) cell.append(`${before} → `);
  cell.append(make("b", after));
  if (n > 1) cell.append(make("small", `  means of ${n}`));
  return cell;
}

function duration(seconds) {
  if (!seconds) return "0";
  if (seconds < 120 && seconds % 60) return `${Math.round(seconds)} s`;
  return seconds < 7200 && seconds % 3600 ? `${Math.round(seconds / 60)} min` : `${+(seconds / 3600).toFixed(1)} h`;
}

function drawCharts() {
  const several = data.runs.length > 1, text = state.m.toLowerCase(), zero = [], boxes = [];
  const wide = at("curves").clientWidth, columns = Math.max(1, Math.floor((wide + 12) / 412));
  const width = Math.floor((wide - 12 * (columns - 1)) / columns) - 22;
  const found = names.filter(name => name.toLowerCase().includes(text));
  let charts = CHARTS.map(([title, one, more]) => [title, names.filter(name => (several && more || one).test(name))]);
  if (text) charts = found.slice(0, 40).map(name => [name, [name]]);
  plots.forEach(plot => plot.destroy());
  plots = [];
  for (const [title, shown] of charts) {
    const values = data.runs.flatMap(run => shown.flatMap(name => valuesOf(run, name)));
    if (values.length && (text || values.some(x => x !== 0))) boxes.push(chartOf(title, shown, width));
    else if (values.length) zero.push(title);
  }
  at("flat").textContent = text ? `${found.length} of ${names.length} metrics${found.length > 40 ? ", the first 40 shown" : ""}`
    : zero.length ? "zero throughout, not drawn: " + zero.join("; ") : "";
  at("charts").style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  at("charts").replaceChildren(...boxes);
}

function chartOf(title, shown, width) {
  const box = make("div", undefined, "chart"), heading = box.appendChild(make("h2", title));
  const several = data.runs.length > 1, prefix = commonPrefix(shown), series = [], tables = [], smoothed = [];
  const smoothing = +state.smooth, limit = HEALTHY_UNDER[shown[0]], style = getComputedStyle(document.documentElement);
  data.runs.forEach((run, number) => {
    const here = hidden(number) ? [] : shown.filter(name => valuesOf(run, name).length);
    if (!here.length) return;
    tables.push([state.x === "step" ? run.steps : run.clock]);
    for (const name of here) {
      const index = shown.indexOf(name), metric = name.slice(prefix);
      series.push({
        label: several ? (shown.length > 1 ? `${metric} · ${run.name}` : run.name) : metric,
        colour: colourOfRun(several ? number : index), dash: DASHES[several ? index % 4 : Math.floor(index / 8) % 4],
        last: valuesOf(run, name).at(-1), raw: run.metrics[name],
      });
      tables.at(-1).push(run.metrics[name]);
      smoothed.push([tables.at(-1)[0], smooth(run.metrics[name], /^val[-/]/.test(name) ? 0 : smoothing)]);
    }
  });
  if (smoothing) tables.push(...smoothed);              // drawn later, so above the raw curves of all runs
  if (limit !== undefined) heading.append(make("small", `healthy under ${limit}`));
  const [ink, line, band] = ["--soft", "--line", "--band"].map(name => style.getPropertyValue(name));
  const axis = {stroke: ink, font: "11px system-ui, sans-serif", grid: {stroke: line, width: 1}, ticks: {show: false}};
  const curves = series.map(({colour, dash, raw}) => ({stroke: colour, dash, width: raw.length > LONG ? 1 : 2, spanGaps: true,
    points: {show: raw.filter(isNumber).length <= 12, size: 6, fill: colour}}));
  const raw = curves.map(curve => ({...curve, stroke: curve.stroke + (several ? "22" : "55"), width: 1, points: {show: false}}));
  if (smoothing) curves.forEach(curve => { curve.width = 2; });
  const shownRuns = new Set(series.map(({colour}) => colour)), under = [...shownRuns].reverse();
  if (several && under.length <= 4)                     // equal curves lie over each other: the lower ones are wider
    curves.forEach(curve => { curve.width += under.indexOf(curve.stroke); });
  const plot = new uPlot({
    width, height: 200, legend: {show: false}, cursor: {sync: {key: "x"}, drag: {x: true, y: false}}, padding: [8, 24, 0, 0],
    scales: {x: {time: false}, y: {range: (_, low, high) => low < high ? uPlot.rangeNum(low, high, 0.1, true)
      : low === null ? [0, 1] : [low - (Math.abs(low) || 1) / 2, low + (Math.abs(low) || 1) / 2]}},
    axes: [{...axis, size: 28, incrs: state.x === "step" ? undefined : TIMES, values: (_, ticks) => ticks.map(x => state.x !== "step" ? duration(x) : Number.isInteger(x) ? x : "")},
           {...axis, size: 54, values: (_, ticks) => ticks.map(x => show(x, digitsOf(ticks)))}],
    series: [{}, ...smoothing ? [...raw, ...curves] : curves],
    hooks: {
      drawClear: [plot => limit !== undefined && drawBand(plot, limit, band)],
      setCursor: [plot => legend(plot.cursor.idx)],
    },
  }, uPlot.join(tables.length ? tables : [[[]]]), box);
  const entries = series.map(({label, colour, dash}) => {
    const entry = make("div"), text = make("span", label), value = make("b");
    text.title = label;
    entry.append(lineOf(colour, dash), text, value);
    return [entry, value];
  });
  function legend(index) {                              // the values under the mouse, else the last ones
    series.forEach(({last}, i) => {
      const curve = plot.data[i + 1];                   // the raw one
      entries[i][1].textContent = show(index === null || index === undefined ? last : curve[index]);
    });
  }
  legend(null);
  box.appendChild(make("div", undefined, "legend")).append(...entries.map(([entry]) => entry));
  plots.push(plot);
  return box;
}

function lineOf(colour, dash) {                         // a piece of the curve for the legend
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS(svg.namespaceURI, "line");
  for (const [name, value] of Object.entries({width: 22, height: 8})) svg.setAttribute(name, value);
  for (const [name, value] of Object.entries({x1: 0, x2: 22, y1: 4, y2: 4, stroke: colour, "stroke-width": 2.5,
    "stroke-dasharray": (dash ?? []).join(" ")})) line.setAttribute(name, value);
  svg.append(line);
  return svg;
}

function drawBand(plot, limit, colour) {
  const {left, top, width, height} = plot.bbox, y = Math.min(Math.max(plot.valToPos(limit, "y", true), top), top + height);
  plot.ctx.fillStyle = colour;
  plot.ctx.fillRect(left, y, width, top + height - y);
}

function smooth(values, weight) {                       // exponential mean; its start is not pulled towards 0
  let sum = 0, total = 0;
  return values.map(x => {
    if (x === null) return null;
    sum = weight * sum + (1 - weight) * x;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function commonPrefix(words) {                          // up to the last "/" that all share
  let length = 0;
  while (length < words[0].length && words.every(word => word[length] === words[0][length])) length++;
  return words[0].lastIndexOf("/", length) + 1;
}

// ---------------------------------------------------------------- the list of responses

const ROW = 26;                                         // pixels
const COLUMNS = [                                       // heading, value, is a number
  ["step", r => r.step, true], ["group", r => r.group, true], ["reward", r => r.reward, true],
  ["adv.", r => r.advantage, true], ["tokens", r => r.response_length, true], ["end", r => r.end_reason ?? r.finish_reason, false],
  ["response", r => r.response.slice(0, 200), false],
];
let rows = [], chosen = null, drawn = new Map();        // rows: a response, or {title, notes} of a group

function chosenRollouts() {
  const min = state.min === "" ? -Infinity : +state.min, max = state.max === "" ? Infinity : +state.max;
  const text = state.q.toLowerCase(), prompts = data.prompts.map(prompt => prompt.toLowerCase().includes(text));
  const found = data.rollouts.filter(r =>
    (state.step === "" || r.step === +state.step) && (state.run === "" || r.run === +state.run) &&
    (state.kind === "" || r.validation === (state.kind === "validation")) &&
    (r.reward === null ? state.min + state.max === "" : r.reward >= min && r.reward <= max) &&
    (prompts[r.prompt] || r.response.toLowerCase().includes(text)));
  const [heading, order] = [state.sort.replace("-", ""), state.sort.startsWith("-") ? -1 : 1];
  const column = COLUMNS.find(([name]) => name === heading);
  if (!column) return found;
  const key = r => column[1](r) ?? -Infinity;
  return found.sort((a, b) => order * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
}

function sameGroup(a, b) { return timeOf(a) === timeOf(b) && a.group === b.group; }
function timeOf(r) { return `${r.run} ${r.validation} ${r.step}`; }

function groupsOf(found) {                              // in the order of their first responses
  if (state.by === "none") return found;
  const groups = new Map();
  for (const r of found) {
    const key = state.by === "prompt" ? r.prompt : `${timeOf(r)} ${r.group}`;
    groups.has(key) ? groups.get(key).push(r) : groups.set(key, [r]);
  }
  return [...groups.values()].flatMap(members => [{
    title: (state.by === "prompt" ? "" : `${nameOf(members[0])}${whenOf(members[0])} · group ${members[0].group} · `) + snippet(members[0]),
    notes: state.by === "prompt" ? overTime(members) : `${members.length} × reward ${show(rewardOf(members))}`,
  }, ...members]);
}

function nameOf(r) { return data.runs.length > 1 ? data.runs[r.run].name + " · " : ""; }
function whenOf(r) { return (r.validation ? "validation, " : "") + `step ${r.step}`; }
function rewardOf(members) { return mean(members.map(r => r.reward).filter(isNumber)); }

function overTime(members) {                            // mean reward at first and at last, of each run
  return "reward " + [...new Set(members.map(r => r.run))].map(run => {
    const own = members.filter(r => r.run === run), ends = [own[0], own.at(-1)].map(timeOf);
    return [...new Set(ends)].map(time => show(rewardOf(own.filter(r => timeOf(r) === time)))).join(" → ");
  }).join(" · ");
}

function snippet(r) {                                   // the last turn of the prompt, without the template's marks
  const turns = data.prompts[r.prompt].slice(-2000).split(/<\|[^|]*\|>(?:user|assistant|system)?/).filter(turn => turn.trim());
  return (turns.at(-1) ?? "").replace(/\s+/g, " ").trim().slice(-140);
}

function drawRollouts() {
  const found = chosenRollouts(), left = data.runs.map(run => run.left_out).filter(Boolean).join("; ");
  rows = groupsOf(found);
  at("count").textContent = data.rollouts.length
    ? `${found.length} of ${data.rollouts.length} responses${left && "; " + left}` : "no rollouts on disk";
  chosen = data.rollouts.find(r => r.id === state.show) ?? rows.find(row => row.id && !row.validation) ?? rows.find(row => row.id) ?? null;
  at("head").replaceChildren(make("span"), ...COLUMNS.map(([name, , number]) => {
    const arrow = state.sort === name ? " ▲" : state.sort === "-" + name ? " ▼" : "";
    return clickable(make("span", name + arrow, number ? "number" : ""),
      () => go({sort: state.sort === "-" + name ? name : "-" + name}));
  }));
  at("rows").style.height = rows.length * ROW + "px";
  const list = at("list"), top = rows.indexOf(chosen) * ROW;
  if (top >= 0 && (top < list.scrollTop || top + 2 * ROW > list.scrollTop + list.clientHeight))
    list.scrollTop = top - list.clientHeight / 2;       // in sight, without moving the page
  at("rows").replaceChildren();
  drawn = new Map();
  drawRows();
  drawDetail();
}

function drawRows() {                                   // those in sight, of any number
  const list = at("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 10);
  const end = Math.min(rows.length, first + Math.ceil(list.clientHeight / ROW) + 20);
  for (const [i, row] of drawn) {
    if (i >= first && i < end) continue;
    row.remove();
    drawn.delete(i);
  }
  for (let i = first; i < end; i++) if (!drawn.has(i)) drawn.set(i, at("rows").appendChild(rowOf(rows[i], i)));
}

function rowOf(r, i) {
  const row = make("div", undefined, "row");
  row.style.top = i * ROW + "px";
  if (!r.id) {
    row.classList.add("group");
    row.append(make("span", r.title), make("span", r.notes));
    return row;
  }
  row.append(data.runs.length > 1 ? swatch(r.run) : make("i"));
  for (const [name, value, number] of COLUMNS)
    row.append(make("span", number ? show(value(r)) : value(r), number ? "number" : name === "response" ? "text" : ""));
  if (r.validation) row.children[1].textContent = "v " + r.step;
  row.setAttribute("role", "option");
  row.setAttribute("aria-selected", r === chosen);
  row.classList.toggle("on", r === chosen);
  row.onclick = () => go({show: r.id});
  return row;
}

function onKey(event) {
  if (state.tab !== "rollouts" || event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const here = rows.indexOf(chosen), step = {ArrowDown: 1, ArrowUp: -1, ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (event.key === "/") at("q").focus();
  else if (!step) return;
  event.preventDefault();
  let next = here + (step ?? 0);
  const whole = event.key === "ArrowRight" || event.key === "ArrowLeft";
  while (rows[next] && (!rows[next].id || whole && sameGroup(rows[next], chosen))) next += step;
  if (step && rows[next]) go({show: rows[next].id});
}

// ---------------------------------------------------------------- one group, and the tokens of its responses

const SHORT = 2000;                                     // tokens of a group whose responses are all shown at once
let unpacked = new Map(), drawing = 0, observer = null;

async function unpack(r) {                              // what a response has per token
  if (!r.per_token) return {};
  const text = atob(r.per_token), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

async function drawDetail() {
  const detail = at("detail"), turn = ++drawing;
  if (!chosen) return detail.replaceChildren(make("p", "No response fits."));
  const r = chosen, group = data.rollouts.filter(other => sameGroup(other, r));
  const tokens = new Map();
  for (const other of group) {
    tokens.set(other, unpacked.get(other) ?? await unpack(other));
    if (turn !== drawing) return;                       // another one was chosen in the meantime
  }
  unpacked = tokens;
  const prompt = make("div", data.prompts[r.prompt], "prompt"), cards = make("div");
  const truth = `${nameOf(r)}${whenOf(r)}, group ${r.group} of ${r.data_source}, ground truth ${r.ground_truth}`;
  const scale = scaleOf(tokens), short = group.reduce((sum, other) => sum + other.response_length, 0) <= SHORT;
  const sameCards = detail.dataset.group === `${timeOf(r)} ${r.group}`, scrolled = detail.scrollTop;
  cards.id = "group";
  cards.className = short ? "short" : "";
  observer?.disconnect();
  observer = new IntersectionObserver(seen => seen.forEach(({target, isIntersecting, boundingClientRect}) => {
    isIntersecting ? target.fill() : target.empty(boundingClientRect.height);
  }), {root: detail, rootMargin: "400px"});
  const columns = Math.max(20, Math.floor((detail.clientWidth - 60) / 7.55));
  cards.append(...group.map(other => cardOf(other, tokens.get(other), scale, short || other === r, columns)));
  detail.replaceChildren(make("h2", truth), make("p", summaryOf(group)), timesOf(r), ...data.pictures[r.prompt].map(pictureOf), prompt, paintOf(scale), cards);
  detail.dataset.group = `${timeOf(r)} ${r.group}`;
  prompt.scrollTop = prompt.scrollHeight;               // the question stands at the end
  detail.scrollTop = sameCards ? scrolled : 0;
  if (!short) cards.querySelector(".on").scrollIntoView({block: "nearest"});
}

function pictureOf(source) {                            // an image of the prompt
  const picture = make("img");
  picture.src = source;
  return picture;
}

function summaryOf(group) {
  const range = values => values.length ? `${show(mean(values))} (${show(values.reduce((a, b) => Math.min(a, b)))} to ${show(values.reduce((a, b) => Math.max(a, b)))})` : "–";
  const numbers = key => group.map(r => r[key]).filter(isNumber), cut = group.filter(r => r.finish_reason === "length").length;
  return `${group.length} response${group.length > 1 ? "s" : ""} · reward ${range(numbers("reward"))} · tokens ${range(numbers("response_length"))}` +
    ` · ${cut} cut at the longest length · ${numbers("advantage").length} trained on`;
}

function timesOf(r) {                                   // the same prompt at other steps, in validations, in other runs
  const times = make("div"), groups = new Map();
  times.id = "times";
  for (const other of data.rollouts) {
    if (other.prompt !== r.prompt) continue;
    const key = timeOf(other);
    groups.has(key) ? groups.get(key).push(other) : groups.set(key, [other]);
  }
  if (groups.size < 2) return times;
  times.append("this prompt over time, mean reward: ");
  for (const members of groups.values()) {
    const button = times.appendChild(make("button"));
    if (data.runs.length > 1) button.append(swatch(members[0].run));
    button.append(`${whenOf(members[0])}: ${show(rewardOf(members))}`);
    button.className = timeOf(members[0]) === timeOf(r) ? "on" : "";
    button.onclick = () => go({show: members[0].id});
  }
  return times;
}

function paintOf(scale) {
  const paint = make("div"), select = make("select"), label = make("label", "tokens coloured by ");
  paint.id = "paint";
  for (const name in PAINTS) select.append(new Option(name, name, false, name === state.paint));
  select.onchange = () => go({paint: select.value});
  label.append(select);
  paint.append(label, legendOf(scale));
  return paint;
}

function scaleOf(tokens) {                              // one scale for the group: {value, middle, size}
  const [value, middle] = PAINTS[state.paint];
  let size = 0, known = false;
  for (const x of tokens.values()) {
    for (let t = 0; t < (x.tokens?.length ?? 0); t++) {
      const found = isOwn(x, t) ? value(x, t) : null;
      if (found === null) continue;
      known = true;
      size = Math.max(size, Math.abs(found - (middle ?? 0)));
    }
  }
  return {value, middle, known, size};
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

function cardOf(r, x, scale, open, columns) {
  const card = make("div", undefined, r === chosen ? "response on" : "response");
  const title = card.appendChild(make("h3", `#${r.index}  reward ${show(r.reward)}  adv. ${show(r.advantage)} `));
  const parts = Object.entries(r.reward_parts).map(([name, value]) => ` · ${name} ${show(value)}`).join("");
  const preview = open ? "" : " · " + r.response.slice(0, 160).replace(/\s+/g, " ");
  const turns = r.messages ? `, ${r.num_turns} turn${r.num_turns > 1 ? "s" : ""}` : "";
  title.append(make("small", `${r.response_length} tokens${turns}, ${r.end_reason ?? r.finish_reason}${parts}${preview}`));
  clickable(title, () => go({show: r.id}));
  if (!open) return card;
  const body = card.appendChild(make("div", undefined, "tokens"));
  if (!x.token_texts) {                                 // a validation
    body.append(...r.messages ? conversationOf(r) : [plain(r.response)]);
    return card;
  }
  const names = x.mask ? writersOf(r, x.mask) : [];
  for (const [from, to] of chunksOf(x.token_texts, x.mask)) {
    if (x.mask && x.mask[from] !== x.mask[from - 1]) body.append(make("div", names.shift(), "writer"));
    const chunk = body.appendChild(make("div", undefined, isOwn(x, from) ? "" : "others"));
    const lines = x.token_texts.slice(from, to).join("").replace(/\n$/, "").split("\n");
    chunk.style.height = 22 * lines.reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / columns)), 0) + "px";
    chunk.fill = () => {
      if (chunk.firstChild) return;
      chunk.style.height = "";
      for (let t = from; t < to; t++) chunk.append(tokenOf(x, t, scale));
    };
    chunk.empty = height => {
      if (!chunk.firstChild) return;
      chunk.style.height = height + "px";
      chunk.replaceChildren();
    };
    if (to <= 200) chunk.fill();                        // the beginning at once
    observer.observe(chunk);
  }
  body.onmouseover = event => event.target.dataset.token && showTip(x, +event.target.dataset.token, event.target);
  body.onmouseout = () => { at("tip").hidden = true; };
  return card;
}

function repliesOf(messages, count) {                   // the places of the last replies
  return messages.map((message, i) => message.role === "assistant" ? i : -1).filter(i => i >= 0).slice(-count);
}

function writerOf(message) {
  return message.role === "assistant" ? "model" : message.name ? `${message.role} ${message.name}` : message.role;
}

function writersOf(r, mask) {                           // of each stretch of tokens
  const messages = JSON.parse(r.messages);
  const replies = repliesOf(messages, mask.filter((own, t) => own && !mask[t - 1]).length);
  return replies.flatMap((i, n) => ["model", messages.slice(i + 1, replies[n + 1]).map(writerOf).join(", ")]);
}

function conversationOf(r) {                            // from the first reply on, as text
  const messages = JSON.parse(r.messages), shown = r.num_turns ? messages.slice(repliesOf(messages, r.num_turns)[0]) : [];
  return shown.flatMap(message => [make("div", writerOf(message), "writer"),
    make("div", message.content, message.role === "assistant" ? "" : "others")]);
}

function chunksOf(texts, mask) {                        // [from, to): whole lines of one writer, if these are not too long
  const chunks = [];
  for (let from = 0, t = 0; t < texts.length; t++) {
    if (t + 1 === texts.length || mask && mask[t] !== mask[t + 1] || t - from >= 150 || t - from >= 50 && texts[t].endsWith("\n")) {
      chunks.push([from, t + 1]);
      from = t + 1;
    }
  }
  return chunks;
}

function tokenOf(x, t, scale) {
  const text = x.token_texts[t], value = isOwn(x, t) ? scale.value(x, t) : null;
  const span = make("span", text === "" ? "·" : text.replaceAll("\n", "⏎\n"));
  if (value !== null) span.style.backgroundColor = colourOf(scale, value);
  if (!isOwn(x, t) || x.trained && !x.trained[t]) span.className = "untrained";
  span.dataset.token = t;
  return span;
}

function showTip(x, t, span) {
  const table = make("table");
  for (const [name, key] of Object.entries(NUMBERS)) {
    const value = isOwn(x, t) ? at_(x[key], t) : null;
    if (value === null) continue;
    const row = table.appendChild(make("tr"));
    row.append(make("td", name), make("td", show(value)));
  }
  const tip = at("tip"), box = span.getBoundingClientRect();
  const trained = !isOwn(x, t) ? ", not the model's" : !x.trained || x.trained[t] ? "" : ", not trained";
  tip.replaceChildren(make("div", `${JSON.stringify(x.token_texts[t])}  token ${t}, id ${x.tokens[t]}${trained}`), table);
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = (box.bottom + tip.offsetHeight + 6 < innerHeight ? box.bottom + 4 : box.top - tip.offsetHeight - 4) + "px";
}

// ---------------------------------------------------------------- flags

function drawFlags() {
  const head = make("tr");
  head.append(make("th", "flag"), ...data.runs.map(run => make("th", run.name)));
  const flags = [...new Set(data.runs.flatMap(run => Object.keys(run.flags)))];
  const differs = flag => data.runs.some(run => run.flags[flag] !== data.runs[0].flags[flag]);
  const lines = [...flags.filter(differs), ...flags.filter(flag => !differs(flag))].map(flag => {
    const row = make("tr", undefined, differs(flag) ? "differs" : "");
    row.append(make("td", flag), ...data.runs.map(run => make("td", run.flags[flag] ?? "–")));
    return row;
  });
  at("flags").querySelector("table").replaceChildren(head, ...lines);
}

// ---------------------------------------------------------------- once, and when new data come

function build() {                                      // what follows from the data
  names = [...new Set(data.runs.flatMap(run => Object.keys(run.metrics)))].sort();
  data.rollouts.sort((a, b) => a.run - b.run || a.step - b.step || a.validation - b.validation);       // in time
  for (const r of data.rollouts) r.id = `${r.run}-${r.validation ? "v" : ""}${r.step}-${r.index}`;
  const several = data.runs.length > 1;
  at("warnings").replaceChildren(...data.runs.flatMap(run => run.warnings.map(text => make("li", several ? `${run.name}: ${text}` : text))));
  at("names").replaceChildren(...names.map(name => new Option(name)));
  const steps = [...new Set(data.rollouts.map(r => r.step))].sort((a, b) => a - b);
  at("step").replaceChildren(new Option("all", ""), ...steps.map(step => new Option(step, step)));
  at("run").replaceChildren(new Option("all", ""), ...data.runs.map((run, number) => new Option(run.name, number)));
}

async function poll() {                                 // --watch: new data, without a new page
  try {
    const answer = document.hidden ? {status: 204} : await fetch("data?" + data.version);
    if (answer.status === 200) {
      data = await answer.json();
      build();
      render();
    }
    if (!document.hidden) drawNow(await (await fetch("now")).json());
    at("status").textContent = "live";
  } catch (error) {
    at("status").textContent = "the server has stopped";
  }
  setTimeout(poll, 2000);
}

function drawNow(runs) {                                // what each run does at this moment
  at("now").hidden = false;
  at("now").replaceChildren(...runs.map((now, number) => {
    const line = make("li", undefined, now.state), bar = make("progress"), running = now.state === "running";
    if (data.runs.length > 1) line.append(swatch(number), make("b", data.runs[number].name));
    line.append(make("b", now.state));
    if (isNumber(now.total_steps)) line.append(make("span", `step ${now.step} of ${now.total_steps}`));
    if (running && now.phase) line.append(make("span", `${now.phase} for ${duration(Math.max(1, Math.round(now.phase_s)))}`));
    if (running && now.total) {
      Object.assign(bar, {value: now.done, max: now.total, title: `${now.done} of ${now.total}`});
      line.append(bar, make("span", `${now.done} of ${now.total}`));
    }
    if (running && isNumber(now.tokens_per_s)) line.append(make("span", `${Math.round(now.tokens_per_s).toLocaleString("en")} tokens/s`));
    if (isNumber(now.left_s)) line.append(make("span", `${duration(Math.round(now.left_s))} left`));
    const newest = Math.max(...data.rollouts.filter(r => r.run === number && !r.validation).map(r => r.step));
    if (newest > 0) {
      const button = clickable(make("a", `newest rollouts: step ${newest}`), () => go({...DEFAULTS, theme: state.theme,
        tab: "rollouts", run: String(number), kind: "training", step: String(newest)}));
      line.append(button);
    }
    return line;
  }));
}

function start() {
  DEFAULTS.smooth = Math.max(...data.runs.map(run => run.steps.length)) > LONG ? "0.9" : "0";
  state = {...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1)))};
  if (!(state.tab in TABS)) state.tab = "curves";
  if (!(state.paint in PAINTS)) state.paint = DEFAULTS.paint;
  render();
}

for (const [tab, title] of Object.entries(TABS)) {
  const button = at("tabs").appendChild(make("button", title));
  button.id = "tab-" + tab;
  button.onclick = () => go({tab});
}
for (const id of FIELDS) at(id).oninput = () => go({[id]: at(id).value, ...at("rollouts").contains(at(id)) ? {show: ""} : {}});
for (const form of document.querySelectorAll("form")) form.onsubmit = event => event.preventDefault();
at("theme").onclick = () => go({theme: theme() === "dark" ? "light" : "dark"});
at("list").onscroll = drawRows;
addEventListener("keydown", onKey);
addEventListener("resize", render);
addEventListener("hashchange", start);
matchMedia("(prefers-color-scheme: dark)").onchange = render;
build();
start();
if (data.version) poll();
