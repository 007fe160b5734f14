// The browser of completions: filter, sort, and the difference of two completions of one prompt.

const SHOWN_AT_ONCE = 20;
const MOST_WORDS = 1500; // a longer pair is shown without marks: the table of the comparison grows with its square

function option(value, label) {
  return node("option", { value }, label);
}

function completionsSection(runs) {
  const logged = runs.filter((run) => run.completions && run.completions.rows.length);
  if (!logged.length) {
    return section("completions", "Completion browser", node("p", { class: "reason" }, runs[0].reasons.completions || "No completion has been logged yet."));
  }
  const place = node("div", {});
  const show = (index) => place.replaceChildren(...browser(logged[index]));
  const chooser = node("select", { "aria-label": "run", onchange: (event) => show(Number(event.target.value)) },
    logged.map((run, i) => option(i, run.name)));
  show(0);
  return section("completions", "Completion browser", logged.length > 1 ? node("div", { class: "filters" }, node("label", {}, "run ", chooser)) : null, place);
}

function browser({ completions }) {
  const { rows, functions, prompts } = completions;
  const rollouts = [...new Set(rows.map((row) => row.rollout))].sort((a, b) => a - b);
  const versions = new Map(rows.map((row) => [row.rollout, row.version]));
  const state = { rollout: rollouts[rollouts.length - 1], text: "", by: -1, low: null, high: null, order: "high", count: SHOWN_AT_ONCE };
  const list = node("div", {});
  const summary = node("p", { class: "reason small" });
  const difference = node("div", {});
  const score = (row) => (state.by < 0 ? row.total : row.rewards[state.by]);

  const selected = () => rows.filter((row) => (state.rollout === null || row.rollout === state.rollout)
    && (state.text === "" || row.text.toLowerCase().includes(state.text) || prompts[row.prompt].toLowerCase().includes(state.text))
    && (state.low === null || (score(row) !== null && score(row) >= state.low))
    && (state.high === null || (score(row) !== null && score(row) <= state.high)));
  const orders = {
    high: (a, b) => (score(b) ?? -Infinity) - (score(a) ?? -Infinity),
    low: (a, b) => (score(a) ?? Infinity) - (score(b) ?? Infinity),
    long: (a, b) => b.text.length - a.text.length,
    prompt: (a, b) => a.prompt - b.prompt,
  };
  const compare = (row) => {
    difference.replaceChildren(comparison(completions, row, () => difference.replaceChildren()));
    difference.scrollIntoView({ block: "nearest" });
  };
  const draw = () => {
    const found = selected();
    if (orders[state.order]) found.sort(orders[state.order]);
    const where = state.rollout === null ? "all rollouts" : `rollout ${state.rollout}, weights of step ${versions.get(state.rollout)}`;
    summary.textContent = `${found.length} completions of ${where}${completions.left_out ? `; ${completions.left_out}` : ""}`;
    const cards = found.slice(0, state.count).map((row) => completionCard(row, functions, prompts, () => compare(row)));
    const more = found.length > state.count
      ? [node("p", {}, node("button", { onclick: () => { state.count += SHOWN_AT_ONCE; draw(); } }, `show more of ${found.length - state.count}`))] : [];
    list.replaceChildren(...cards, ...more);
  };
  const set = (change) => { Object.assign(state, { count: SHOWN_AT_ONCE }, change); draw(); };

  const choice = node("select", { "aria-label": "rollout", onchange: (event) => set({ rollout: event.target.value === "" ? null : Number(event.target.value) }) },
    option("", "all rollouts"), rollouts.map((rollout) => option(rollout, `rollout ${rollout}`)));
  const move = (by) => {
    const at = state.rollout === null ? rollouts.length - 1 : rollouts.indexOf(state.rollout) + by;
    const rollout = rollouts[Math.min(Math.max(at, 0), rollouts.length - 1)];
    choice.value = String(rollout);
    set({ rollout });
  };
  choice.value = String(state.rollout);
  const limit = (name) => node("input", { type: "number", step: "any", placeholder: name === "low" ? "min" : "max", "aria-label": `${name === "low" ? "least" : "largest"} reward`,
    oninput: (event) => set({ [name]: event.target.value === "" ? null : Number(event.target.value) }) });
  const by = functions.length > 1
    ? node("select", { "aria-label": "reward function", onchange: (event) => set({ by: Number(event.target.value) }) },
      option(-1, "total reward"), functions.map((name, i) => option(i, name))) : node("span", {}, "reward");
  const filters = node("div", { class: "filters" },
    node("span", {}, node("button", { "aria-label": "previous rollout", onclick: () => move(-1) }, "‹"), " ", choice, " ",
      node("button", { "aria-label": "next rollout", onclick: () => move(1) }, "›")),
    node("input", { type: "search", placeholder: "text in prompt or completion", "aria-label": "text", oninput: (event) => set({ text: event.target.value.toLowerCase() }) }),
    node("span", {}, by, " ", limit("low"), " to ", limit("high")),
    node("label", {}, "order ", node("select", { onchange: (event) => set({ order: event.target.value }) },
      option("high", "highest reward"), option("low", "lowest reward"), option("long", "longest"), option("prompt", "by prompt"), option("logged", "as logged"))));
  draw();
  return [filters, summary, difference, list];
}

function chips(row, functions) {
  const values = functions.length > 1 ? functions.map((name, i) => node("span", { class: "chip" }, `${name} ${short(row.rewards[i])}`)) : [];
  return [node("span", { class: "chip total" }, `reward ${short(row.total)}`), values,
    node("span", { class: "soft" }, [`advantage ${short(row.advantage)}`, row.tokens === null ? null : `${row.tokens} tokens`,
      row.truncated ? "truncated" : null, `rollout ${row.rollout}`].filter(Boolean).join(" · "))];
}

function completionCard(row, functions, prompts, onCompare) {
  const prompt = prompts[row.prompt];
  return node("article", { class: "card completion" },
    node("div", { class: "chips" }, chips(row, functions), node("button", { onclick: onCompare }, "compare")),
    node("details", {}, node("summary", { class: "prompt" }, prompt.replaceAll(/\s+/g, " ")), node("pre", { class: "soft" }, prompt)),
    node("pre", { class: "text" }, row.text));
}

// Two completions of one prompt side by side: those of another rollout, or the others of the same group.
function comparison({ rows, functions, prompts }, left, onClose) {
  const same = rows.filter((row) => row.prompt === left.prompt && row !== left)
    .sort((a, b) => a.rollout - b.rollout || (b.total ?? 0) - (a.total ?? 0));
  if (!same.length) {
    return node("p", { class: "note" }, "There is no other completion of this prompt on this page. ", node("button", { onclick: onClose }, "close"));
  }
  const others = same.filter((row) => row.rollout !== left.rollout);
  const place = node("div", {});
  const choice = node("select", { "aria-label": "the other completion", onchange: () => show() },
    same.map((row, i) => option(i, `rollout ${row.rollout}, reward ${short(row.total)}`)));
  const show = () => {
    const pair = [left, same[Number(choice.value)]].sort((a, b) => a.rollout - b.rollout); // the older one on the left
    const [before, after] = differences(pair[0].text, pair[1].text);
    place.replaceChildren(node("div", { class: "sides" },
      node("div", {}, node("div", { class: "chips" }, chips(pair[0], functions)), node("pre", {}, before)),
      node("div", {}, node("div", { class: "chips" }, chips(pair[1], functions)), node("pre", {}, after))));
  };
  choice.value = String(same.indexOf(others[0] || same[0]));
  show();
  return node("div", { class: "card completion", "data-comparison": true },
    node("div", { class: "filters" }, node("b", {}, "Two completions of one prompt"), node("label", {}, "compare with ", choice),
      node("button", { onclick: onClose }, "close")),
    node("p", { class: "prompt" }, prompts[left.prompt].replaceAll(/\s+/g, " ")), place);
}

// Return the nodes of both texts; words that only one of them has are marked.
function differences(before, after) {
  let [a, b] = [before, after].map((text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || []);
  if (a.length < 6 || b.length < 6) [a, b] = [[...before], [...after]]; // text without words: characters
  if (a.length > MOST_WORDS || b.length > MOST_WORDS) return [[before], [after]];
  const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const [left, right] = [[], []];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      left.push(["", a[i++]]);
      right.push(["", b[j++]]);
    } else if (j >= b.length || (i < a.length && common[i + 1][j] >= common[i][j + 1])) left.push(["del", a[i++]]);
    else right.push(["ins", b[j++]]);
  }
  return [marked(left), marked(right)];
}

function marked(parts) {
  const joined = [];
  for (const [mark, text] of parts) {
    const last = joined[joined.length - 1];
    if (last && last[0] === mark) last[1] += text;
    else joined.push([mark, text]);
  }
  return joined.map(([mark, text]) => (mark ? node(mark, {}, text) : text));
}
