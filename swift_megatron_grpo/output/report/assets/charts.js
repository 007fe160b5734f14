// Curves, stacked bars and histograms as SVG.

const WIDTH = 400;
const HEIGHT = 190;
const EDGE = { left: 46, right: 10, top: 8, bottom: 22 };
const settings = { smooth: false };
const redraws = []; // one function per chart, called when `settings` change

function frame(lowX, highX, lowY, highY, isCount, width = WIDTH) {
  const svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img" });
  const right = width - EDGE.right;
  const bottom = HEIGHT - EDGE.bottom;
  const x = (value) => EDGE.left + ((value - lowX) / (highX - lowX || 1)) * (right - EDGE.left);
  const y = (value) => bottom - ((value - lowY) / (highY - lowY || 1)) * (bottom - EDGE.top);
  for (const tick of ticks(lowY, highY, 4)) {
    svg.append(shape("line", { class: "grid-line", x1: EDGE.left, x2: right, y1: y(tick), y2: y(tick) }));
    svg.append(shape("text", { x: EDGE.left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  for (const tick of ticks(lowX, highX, 5)) {
    if (isCount && !Number.isInteger(tick)) continue;
    svg.append(shape("text", { x: x(tick), y: HEIGHT - 6, "text-anchor": "middle" }, short(tick)));
  }
  return { svg, x, y, right, bottom };
}

function path(points, x, y) {
  return points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
}

function pairs(steps, values) {
  return steps.map((step, i) => [step, values[i]]).filter(([, value]) => value !== null && value !== undefined);
}

function legend(entries) {
  const marks = entries.map(({ name, color: fill }) => {
    const mark = node("i");
    mark.style.background = fill;
    return node("span", {}, mark, name);
  });
  return node("div", { class: "legend" }, marks);
}

// series: [{name, color, steps, values, low?, high?}]; low and high are a band around the values.
function curves(title, series, unit) {
  const box = node("div", { class: "card chart", "data-chart": title });
  const draw = () => {
    const all = series.flatMap((one) => [...known(one.values), ...known(one.low), ...known(one.high)]);
    const steps = series.flatMap((one) => one.steps);
    let [low, high] = [Math.min(...all), Math.max(...all)];
    const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    low = low >= 0 && low - room < 0 ? 0 : low - room; // no space below 0 where no value is negative
    high += room;
    const axes = frame(Math.min(...steps), Math.max(...steps), low, high, true);
    for (const one of series) drawSeries(axes, one);
    addCursor(axes, series);
    const head = node("h3", {}, title, unit ? node("span", { class: "soft small" }, ` ${unit}`) : null);
    box.replaceChildren(head, legend(series.length > 1 ? series : []), axes.svg);
  };
  draw();
  redraws.push(draw);
  return box;
}

function drawSeries({ svg, x, y }, { color: stroke, steps, values, low, high }) {
  if (low && high) {
    const area = [...pairs(steps, high), ...pairs(steps, low).reverse()];
    svg.append(shape("path", { class: "band", d: `${path(area, x, y)}Z`, fill: stroke }));
  }
  const points = pairs(steps, values);
  if (points.length === 1) {
    svg.append(shape("circle", { class: "curve", cx: x(points[0][0]), cy: y(points[0][1]), r: 3, stroke }));
  }
  const raw = settings.smooth && points.length > 4 ? "curve faint" : "curve";
  svg.append(shape("path", { class: raw, d: path(points, x, y), stroke }));
  if (raw !== "curve") {
    svg.append(shape("path", { class: "curve", d: path(pairs(steps, smoothed(values)), x, y), stroke }));
  }
}

// Show the values of the step under the pointer in the legend.
function addCursor({ svg, x, right, bottom }, series) {
  const line = shape("line", { class: "cursor", y1: EDGE.top, y2: bottom, visibility: "hidden" });
  const steps = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const marks = () => svg.previousElementSibling;
  svg.append(line);
  svg.addEventListener("pointermove", (event) => {
    const area = svg.getBoundingClientRect();
    const at = ((event.clientX - area.left) / area.width) * WIDTH;
    if (at < EDGE.left - 5 || at > right + 5) return;
    const step = steps.reduce((best, next) => (Math.abs(x(next) - at) < Math.abs(x(best) - at) ? next : best));
    line.setAttribute("x1", x(step));
    line.setAttribute("x2", x(step));
    line.setAttribute("visibility", "visible");
    const entries = series.map((one) => {
      const i = one.steps.indexOf(step);
      const range = i >= 0 && one.low ? ` (${short(one.low[i])} to ${short(one.high[i])})` : "";
      const value = i < 0 ? "–" : short(one.values[i]);
      return { name: `${series.length > 1 ? `${one.name} ` : ""}${value}${range}`, color: one.color };
    });
    const shown = legend(entries);
    shown.prepend(node("span", {}, `step ${step}`));
    marks().replaceWith(shown);
  });
  svg.addEventListener("pointerleave", () => {
    line.setAttribute("visibility", "hidden");
    marks().replaceWith(legend(series.length > 1 ? series : []));
  });
}

// parts: [{name, color, values}], one value per step; steps are joined so that a bar is at least two pixels wide.
function stackedBars(title, steps, parts, unit) {
  const box = node("div", { class: "card chart wide", "data-chart": title });
  const size = Math.ceil(steps.length / 160);
  const groups = [];
  for (let i = 0; i < steps.length; i += size) groups.push([i, Math.min(i + size, steps.length)]);
  const heights = groups.map(([from, to]) => parts.map(({ values }) =>
    values.slice(from, to).reduce((sum, value) => sum + (value || 0), 0) / (to - from)));
  const top = Math.max(...heights.map((bar) => bar.reduce((a, b) => a + b, 0))) * 1.05 || 1;
  const { svg, x, y } = frame(0.5, groups.length + 0.5, 0, top, true, 2 * WIDTH);
  svg.querySelectorAll("text[text-anchor=middle]").forEach((text) => text.remove());
  const wide = x(2) - x(1);
  heights.forEach((bar, i) => {
    let below = 0;
    const whole = shape("g", {});
    const [from, to] = groups[i];
    const name = to - from > 1 ? `steps ${steps[from]} to ${steps[to - 1]}` : `step ${steps[from]}`;
    bar.forEach((value, part) => {
      const rect = { x: x(i + 1) - wide * 0.42, width: wide * 0.84, y: y(below + value), height: y(below) - y(below + value) };
      if (value > 0) whole.append(shape("rect", { ...rect, fill: parts[part].color }));
      below += value;
    });
    const lines = parts.map((part, j) => [part.name, bar[j]]).filter(([, value]) => value > 0);
    whole.append(shape("title", {}, [name, ...lines.map(([label, value]) => `${label} ${duration(value)}`)].join("\n")));
    svg.append(whole);
  });
  for (const at of new Set([0, Math.floor(groups.length / 2), groups.length - 1])) {
    svg.append(shape("text", { x: x(at + 1), y: HEIGHT - 6, "text-anchor": "middle" }, String(steps[groups[at][0]])));
  }
  box.append(node("h3", {}, title, node("span", { class: "soft small" }, ` ${unit}`)), legend(parts), svg);
  return box;
}

// Two distributions over the same bins, as shares; the older one is an outline.
function histogramChart({ name, low, high, first, newest }, labels, index) {
  const box = node("div", { class: "card chart", "data-chart": `histogram ${name}` });
  const share = (counts) => counts.map((count) => (100 * count) / (counts.reduce((a, b) => a + b, 0) || 1));
  const [before, now] = [share(first), share(newest)];
  const { svg, x, y, bottom } = frame(low, high, 0, Math.max(...before, ...now) * 1.08 || 1, false);
  const width = (high - low) / now.length;
  now.forEach((value, i) => {
    const [from, to] = [x(low + i * width), x(low + (i + 1) * width)];
    const bar = shape("rect", { x: from + 0.5, width: Math.max(to - from - 1, 1), y: y(value), height: bottom - y(value),
      fill: color(index), opacity: 0.75 });
    const range = `${short(low + i * width)} to ${short(low + (i + 1) * width)}`;
    bar.append(shape("title", {}, `${range}: ${labels.newest} ${newest[i]}, ${labels.first || "earlier"} ${first[i]}`));
    if (value > 0) svg.append(bar);
  });
  const entries = [{ name: labels.newest, color: color(index) }];
  if (labels.first) {
    const points = before.flatMap((value, i) => [[low + i * width, value], [low + (i + 1) * width, value]]);
    svg.append(shape("path", { class: "curve", d: path(points, x, y), stroke: "var(--soft)" }));
    entries.unshift({ name: labels.first, color: "var(--soft)" });
  }
  box.append(node("h3", {}, name, node("span", { class: "soft small" }, " % of completions")), legend(entries), svg);
  return box;
}
