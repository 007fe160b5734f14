// Numbers as text, elements, and smoothing. Text of a run reaches the page through textContent only.

function node(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) made.append(child); // append makes a text node of a string
  }
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function color(index) {
  return `var(--c${index % 10})`;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(1).replace("e+", "e");
  if (size >= 10000) return Math.round(value).toLocaleString("en-US");
  const digits = Math.max(0, 3 - Math.floor(Math.log10(size)));
  return Number(value.toFixed(Math.min(digits, 6))).toString();
}

// Three digits, for large print.
function brief(value) {
  return value === null ? "–" : short(Number(value.toPrecision(3)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${short(Math.round(seconds * 10) / 10)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
}

function known(values) {
  return (values || []).filter((value) => value !== null);
}

function mean(values) {
  const present = known(values);
  return present.length ? present.reduce((a, b) => a + b, 0) / present.length : null;
}

function lastOf(values) {
  const present = known(values);
  return present.length ? present[present.length - 1] : null;
}

// An exponential mean over about ten points, without the pull of the first value.
function smoothed(values) {
  const keep = 0.82;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + value;
    weight = keep * weight + 1;
    return sum / weight;
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) result.push(i * step);
  return result;
}
