// The parts of the page in the order of the page. Each returns elements, or nothing where the runs have no data for it.

const GROUPS = [
  { id: "reward", title: "Reward and length", charts: [
    { title: "Reward", metric: "reward", spread: "reward_std", note: "mean ± std within groups" },
    { title: "Reward functions", every: /^rewards\/(.+)\/mean$/ },
    { title: "Groups with equal rewards", metric: "frac_reward_zero_std", note: "share" },
    { title: "Completion length", metric: "completions/mean_length", low: "completions/min_length",
      high: "completions/max_length", note: "tokens: mean, min to max" },
    { title: "Truncated completions", metric: "completions/clipped_ratio", note: "share" },
    { title: "Turns", metric: "num_turns" },
  ] },
  { id: "policy", title: "Policy and optimizer", charts: [
    { title: "KL to the reference", metric: "kl" },
    { title: "Entropy", metric: "entropy/entropy_mean", low: "entropy/entropy_min", high: "entropy/entropy_max",
      note: "mean, min to max over completions" },
    { title: "Clipped tokens", metric: "clip_ratio/region_mean", note: "share" },
    { title: "KL since generation", metric: "actor/approxkl" },
    { title: "Loss", metric: "loss" },
    { title: "Gradient norm", metric: "grad_norm" },
    { title: "Learning rate", metric: "learning_rate" },
  ] },
];

const STALENESS = [
  { title: "Staleness", metric: "rollout/staleness", high: "rollout/staleness_max", low: "rollout/staleness",
    note: "rollouts behind: mean to max" },
];
const SYNC = [
  { title: "Log-prob difference after a sync", metric: "sync_check/mean_diff", note: "per token, fixed text: mean" },
  { title: "Largest difference", metric: "sync_check/max_diff", note: "per token, fixed text" },
  { title: "KL of trainer and vLLM", metric: "rollout/k3_kl", note: "on the completions" },
];

function constant(runs, metric) {
  const values = new Set(runs.flatMap((run) => known(run.training.values[metric])));
  return values.size === 1 ? [...values][0] : null;
}

function has(run, metric) {
  return known(run.training.values[metric]).length > 0;
}

function chartsOf(runs, specs, shown) {
  return specs.flatMap((spec) => {
    if (!spec.every) return chartOf(runs, spec, shown);
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.training.values)))].filter((name) => spec.every.test(name));
    names.forEach((name) => shown.add(name));
    if (names.length < 2) return []; // the one function is the reward
    if (runs.length > 1) return names.flatMap((name) => chartOf(runs, { title: name.match(spec.every)[1], metric: name }, shown));
    const [run] = runs;
    const series = names.map((name, i) => ({ name: name.match(spec.every)[1], color: color(i + 1), steps: run.training.steps,
      values: run.training.values[name] }));
    return [curves(spec.title, series, "mean")];
  });
}

function chartOf(runs, spec, shown) {
  [spec.metric, spec.low, spec.high, spec.spread].forEach((name) => name && shown.add(name));
  const present = runs.filter((run) => has(run, spec.metric));
  const only = constant(present, spec.metric);
  const steps = new Set(present.flatMap((run) => run.training.steps));
  if (!present.length || (only !== null && steps.size > 1 && !(spec.high && constant(present, spec.high) === null))) {
    if (only !== null) constants.set(spec.title, only);
    return [];
  }
  const series = present.map((run) => {
    const values = run.training.values[spec.metric];
    const one = { name: run.name, color: color(runs.indexOf(run)), steps: run.training.steps, values };
    if (runs.length > 1) return one; // bands of several runs would hide each other
    const [low, high, spread] = [spec.low, spec.high, spec.spread].map((name) => name && run.training.values[name]);
    if (low && high) Object.assign(one, { low, high });
    if (spread) {
      const apart = (sign) => values.map((value, i) => (value === null || spread[i] === null ? null : value + sign * spread[i]));
      Object.assign(one, { low: apart(-1), high: apart(1) });
    }
    return one;
  });
  return [curves(spec.title, series, runs.length > 1 ? (spec.note || "").split(/ ±|:/)[0] : spec.note)];
}

const constants = new Map(); // metrics that never change, by title: a curve of them shows nothing

function section(id, title, ...children) {
  return node("section", { id }, node("h2", {}, title), ...children);
}

function curveSections(runs, shown) {
  return GROUPS.flatMap(({ id, title, charts }) => {
    const drawn = chartsOf(runs, charts, shown);
    return drawn.length ? [section(id, title, node("div", { class: "grid" }, drawn))] : [];
  });
}

function withReason(runs, id, title, key, drawn) {
  const reason = runs.map((run) => run.reasons[key]).find(Boolean);
  if (drawn.length) return section(id, title, node("div", { class: "grid" }, drawn));
  return reason ? section(id, title, node("p", { class: "reason" }, reason)) : null;
}

function phaseSection(runs) {
  const drawn = [];
  const speed = runs.filter((run) => run.phases.length).map((run) => ({ name: run.name, color: color(runs.indexOf(run)),
    steps: run.training.steps, values: stepSeconds(run) }));
  if (runs.length === 1 && runs[0].phases.length) {
    const [run] = runs;
    const parts = sortedPhases(run).map(({ name, index }) => ({ name, color: color(index), values: run.training.values[`time/${name}`] }));
    drawn.push(stackedBars("Time of a step by phase", run.training.steps, parts, "seconds"), phaseTable(run));
  } else if (speed.length) {
    drawn.push(curves("Time of a step", speed, "seconds, all phases"));
  }
  const rates = [{ title: "Tokens per second", metric: "speed/tokens_per_second", note: "completions, whole step" },
    { title: "MFU of training", metric: "speed/mfu", note: "share of peak" }];
  return drawn.concat(chartsOf(runs, rates, new Set()));
}

function stepSeconds(run) {
  return run.training.steps.map((_, i) => run.phases.reduce((sum, name) => sum + (run.training.values[`time/${name}`][i] || 0), 0));
}

// The mean of a phase over all steps but the first, which includes start-up; a step without it counts as 0.
function sortedPhases(run) {
  const from = run.training.steps.length > 1 ? 1 : 0;
  const average = (name) => mean(run.training.values[`time/${name}`].slice(from).map((value) => value || 0)) || 0;
  const phases = run.phases.map((name) => ({ name, seconds: average(name), first: run.training.values[`time/${name}`][0] }));
  phases.sort((a, b) => b.seconds - a.seconds);
  return phases.map((phase, index) => ({ ...phase, index }));
}

function phaseTable(run) {
  const phases = sortedPhases(run);
  const total = phases.reduce((sum, { seconds }) => sum + seconds, 0) || 1;
  const first = phases.reduce((sum, phase) => sum + (phase.first || 0), 0);
  const rows = phases.map(({ name, seconds, first: atStart, index }) => {
    const bar = node("div", { class: "bar" });
    bar.style.background = color(index);
    bar.style.width = `${(100 * seconds) / phases[0].seconds}%`;
    return node("tr", {}, node("td", {}, name.replaceAll("_", " ")), node("td", { class: "number" }, duration(seconds)),
      node("td", { class: "number" }, `${Math.round((100 * seconds) / total)} %`), node("td", { class: "number soft" }, duration(atStart)),
      node("td", { class: "wide" }, bar));
  });
  rows.push(node("tr", {}, node("td", {}, node("b", {}, "all")), node("td", { class: "number" }, duration(total)),
    node("td", { class: "number" }, "100 %"), node("td", { class: "number soft" }, duration(first)), node("td", {})));
  const head = ["mean", "share", "step 1"].map((name) => node("th", { class: "number" }, name));
  return node("div", { class: "card" }, node("h3", {}, "Phases", node("span", { class: "soft small" }, " mean per step, without the first")),
    node("div", { class: "scroll" }, node("table", {}, node("tr", {}, node("th", {}, "phase"), head, node("th", {})), rows)));
}

function syncSection(runs, shown) {
  const drawn = chartsOf(runs, SYNC, shown);
  if (!drawn.length || runs.length > 1) return drawn;
  const values = runs[0].training.values;
  const syncs = known(values["sync_check/mean_diff"]);
  if (!syncs.length) return drawn;
  const text = `Every weight sync was verified. In ${syncs.length} of them trainer and vLLM also agree on the log-probs of a fixed `
    + `text, to ${short(Math.max(...syncs))} on average per token at most. A sync that fails twice ends the run.`;
  return [node("div", { class: "card" }, node("h3", {}, "Proof after a sync"), node("p", { class: "small" }, text)), ...drawn];
}

function memorySection(runs, shown) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.training.values)))]
    .filter((name) => name === "memory(GiB)" || name.startsWith("memory/"));
  names.forEach((name) => shown.add(name));
  if (!names.some((name) => runs.some((run) => known(run.training.values[name]).some((value) => value > 0)))) return [];
  if (runs.length > 1) return names.flatMap((name) => chartOf(runs, { title: name, metric: name, note: "GiB" }, shown));
  const series = names.map((name, i) => ({ name: name === "memory(GiB)" ? "reserved by torch, peak" : name.replace("memory/", ""),
    color: color(i), steps: runs[0].training.steps, values: runs[0].training.values[name] }));
  return [curves("GPU memory", series, "GiB")];
}

function evaluationSection(runs) {
  const evaluated = runs.map((run) => ({ ...run, training: run.evaluation }));
  const names = [...new Set(evaluated.flatMap((run) => Object.keys(run.training.values)))]
    .filter((name) => /^eval_(reward|completions\/|rewards\/)/.test(name) && constant(evaluated, name) === null);
  return names.flatMap((name) => chartOf(evaluated, { title: name, metric: name }, new Set()));
}

function otherSection(runs, shown) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.training.values)))]
    .filter((name) => !shown.has(name) && !name.startsWith("time/") && !name.startsWith("speed/")).sort();
  const changing = names.filter((name) => constant(runs, name) === null);
  names.filter((name) => constant(runs, name) !== null).forEach((name) => constants.set(name, constant(runs, name)));
  const grid = node("div", { class: "grid" });
  const fill = () => grid.childNodes.length || grid.append(...changing.flatMap((name) => chartOf(runs, { title: name, metric: name }, shown)));
  const never = [...constants].map(([name, value]) => `${name} ${short(value)}`).join(", ");
  return section("other", "Other metrics",
    changing.length ? node("details", { ontoggle: fill }, node("summary", {}, `${changing.length} more curves`), grid) : null,
    never ? node("p", { class: "reason small" }, `The same in every step: ${never}.`) : null);
}

function histogramSection(runs) {
  return runs.filter((run) => run.histograms).flatMap((run, r) => run.histograms.charts.map((chart, i) =>
    histogramChart(runs.length > 1 ? { ...chart, name: `${run.name}: ${chart.name}` } : chart, run.histograms, runs.length > 1 ? r : i)));
}

function differenceSection(data) {
  if (data.runs.length < 2) return null;
  const head = node("tr", {}, node("th", {}, "setting"), data.runs.map((run) => node("th", {}, run.name)));
  const rows = data.differing.map(([name, ...values]) => node("tr", {}, node("td", {}, `--${name}`),
    values.map((value) => node("td", { class: "value" }, value))));
  return section("differences", "Settings that differ", rows.length
    ? node("div", { class: "card scroll" }, node("table", {}, head, rows))
    : node("p", { class: "reason" }, "All settings are equal, or cannot be read."));
}

function finalSection(runs) {
  const names = ["reward", ...new Set(runs.flatMap((run) => Object.keys(run.training.values)).filter((name) => /^rewards\/.*\/mean$/.test(name))),
    "completions/mean_length", "completions/clipped_ratio", "kl", "loss", "grad_norm", "rollout/k3_kl", "speed/tokens_per_second", "memory(GiB)"];
  const newest = (values) => mean(known(values).slice(-10));
  const rows = names.filter((name) => runs.some((run) => known(run.training.values[name]).some((value) => value !== 0))).map((name) => node("tr", {}, node("td", {}, name),
    runs.map((run) => node("td", { class: "number" }, short(newest(run.training.values[name]))))));
  rows.push(node("tr", {}, node("td", {}, "time of a step"), runs.map((run) => node("td", { class: "number" },
    duration(run.phases.length ? mean(stepSeconds(run).slice(1).slice(-10)) : null)))));
  rows.unshift(node("tr", {}, node("td", {}, "step"), runs.map((run) => node("td", { class: "number" }, `${run.step} of ${run.total_steps || "?"}`))));
  const head = node("tr", {}, node("th", {}, "mean of the last 10 values"), runs.map((run) => {
    const mark = node("i");
    mark.style.background = color(runs.indexOf(run));
    return node("th", { class: "number" }, node("span", {}, mark, run.name));
  }));
  return section("final", "Final values", node("div", { class: "card scroll" }, node("table", {}, head, rows)));
}

function settingsSection(runs) {
  const body = node("table", {});
  const fill = (text) => body.replaceChildren(...Object.entries(runs[0].settings)
    .filter(([name, value]) => `${name} ${value}`.toLowerCase().includes(text.toLowerCase()))
    .map(([name, value]) => node("tr", {}, node("td", {}, `--${name}`), node("td", { class: "value" }, value))));
  const search = node("input", { type: "search", placeholder: "filter settings", "aria-label": "filter settings",
    oninput: (event) => fill(event.target.value) });
  const count = Object.keys(runs[0].settings).length;
  if (runs.length > 1 || !count) return null;
  const open = () => body.childNodes.length || fill("");
  return section("settings", "Settings", node("details", { ontoggle: open }, node("summary", {}, `all ${count} settings`),
    node("div", { class: "card" }, node("div", { class: "filters" }, search), node("div", { class: "scroll" }, body))));
}
