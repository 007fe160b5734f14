// Read the data and build the page.

const data = JSON.parse(document.getElementById("data").textContent);

function tiles(run) {
  const { values, steps } = run.training;
  const change = (name) => {
    const present = known(values[name]);
    const around = Math.max(1, Math.min(5, Math.floor(present.length / 4)));
    return present.length > 1 ? `${brief(mean(present.slice(0, around)))} → ${brief(mean(present.slice(-around)))}` : brief(lastOf(present));
  };
  const pace = run.phases.length && steps.length ? mean(stepSeconds(run).slice(steps.length > 1 ? 1 : 0).slice(-20)) : null;
  const shown = [
    ["reward, start → now", values.reward && change("reward")],
    ["completion tokens", values["completions/mean_length"] && change("completions/mean_length")],
    ["truncated", values["completions/clipped_ratio"] && `${Math.round(100 * lastOf(values["completions/clipped_ratio"]))} %`],
    ["KL to the reference", values.kl && short(lastOf(values.kl))],
    ["gradient norm", values.grad_norm && short(lastOf(values.grad_norm))],
    ["per step", pace === null ? null : duration(pace)],
    ["tokens per second", values["speed/tokens_per_second"] && short(lastOf(values["speed/tokens_per_second"]))],
    ["MFU of training", values["speed/mfu"] && `${Math.round(100 * lastOf(values["speed/mfu"]))} %`],
  ];
  return node("div", { class: "tiles" }, shown.filter(([, value]) => value).map(([label, value]) =>
    node("div", { class: "tile" }, node("b", {}, value), node("span", {}, label))));
}

function status(run) {
  const at = `step ${run.step}${run.total_steps ? ` of ${run.total_steps}` : ""}`;
  if (run.ended) return `${at}, ended ${run.elapsed || "an unknown time"} after its last start`;
  const left = run.remaining ? `, about ${duration(run.remaining)} left` : "";
  return `${at}, ${run.elapsed || "0s"} after its last start${left}; state of ${data.written}`;
}

function runHeader(run) {
  const filled = node("i");
  filled.style.width = `${run.total_steps ? (100 * run.step) / run.total_steps : 0}%`;
  const facts = run.facts.map(([label, value]) => node("span", {}, `${label} `, node("b", {}, value)));
  return [node("h1", {}, run.name), node("div", { class: "soft" }, status(run)), node("div", { class: "progress" }, filled),
    run.training.steps.length ? tiles(run) : null, node("div", { class: "facts" }, facts)];
}

function notes(runs) {
  return runs.flatMap((run) => run.notes.map((text) => node("div", { class: "note" }, runs.length > 1 ? `${run.name}: ${text}` : text)));
}

function body(runs) {
  const shown = new Set(["rollout/staleness", "rollout/staleness_max"]);
  const waiting = runs.every((run) => !run.training.steps.length);
  if (waiting) return [section("curves", "Curves", node("p", { class: "reason" }, runs[0].reasons.curves))];
  return [
    differenceSection(data),
    runs.length > 1 ? finalSection(runs) : null,
    ...curveSections(runs, shown),
    withReason(runs, "phases", "Time", "phases", phaseSection(runs)),
    withReason(runs, "evaluation", "Evaluation", "evaluation", evaluationSection(runs)),
    withReason(runs, "histograms", "Distributions", "histograms", histogramSection(runs)),
    completionsSection(runs),
    withReason(runs, "sync", "Weight syncs", "sync", syncSection(runs, shown)),
    withReason(runs, "staleness", "Staleness", "staleness", chartsOf(runs, STALENESS, shown)),
    withReason(runs, "memory", "Memory", "memory", memorySection(runs, shown)),
    otherSection(runs, shown),
    settingsSection(runs),
  ].filter(Boolean);
}

function controls(runs) {
  const smooth = node("input", { type: "checkbox", onchange: (event) => {
    settings.smooth = event.target.checked;
    redraws.forEach((draw) => draw());
  } });
  const live = node("input", { type: "checkbox", checked: location.hash === "#live", onchange: (event) => {
    location.hash = event.target.checked ? "live" : "";
    if (event.target.checked) location.reload();
  } });
  if (location.hash === "#live") setTimeout(() => location.hash === "#live" && location.reload(), 30000);
  return node("span", { class: "controls" }, node("label", {}, smooth, "smooth"),
    runs.some((run) => !run.ended) ? node("label", {}, live, "reload every 30 s") : null);
}

function build() {
  const { runs } = data;
  document.title = runs.length > 1 ? `${runs.length} runs` : `${runs[0].name}: GRPO run`;
  const head = runs.length > 1 ? [node("h1", {}, `${runs.length} runs`), node("div", { class: "soft" }, `state of ${data.written}`)] : runHeader(runs[0]);
  document.getElementById("header").append(...head.filter(Boolean), ...notes(runs));
  const sections = body(runs);
  document.getElementById("main").append(...sections);
  document.getElementById("nav").append(...sections.map((part) => node("a", { href: `#${part.id}` }, part.querySelector("h2").textContent)), controls(runs));
  const joined = runs.filter((run) => run.steps_per_point > 1).map((run) => `every point of ${run.name} is the mean of ${run.steps_per_point} steps`);
  document.getElementById("footer").textContent = ["Written by swift_megatron_grpo.output.report from logging.jsonl, args.json and completions.jsonl", ...joined].join("; ");
  document.body.dataset.charts = String(document.querySelectorAll("[data-chart] svg").length);
}

build();
