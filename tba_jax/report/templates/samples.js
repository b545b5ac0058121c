// The sample browser and the table of events.
const PAGE_SIZE = 25;

// Unlikely tokens stand out: 0 nats is clear, -5 and below is full colour. A
// token without a log-prob is an environment's.
function tokenNode(token, logprob) {
  const share = logprob === null ? 0 : Math.min(1, -logprob / 5);
  const node = el("span", { class: logprob === null ? "token given" : "token" }, token);
  node.style.background = `color-mix(in srgb, var(--c1) ${Math.round(70 * share)}%, transparent)`;
  node.title = logprob === null ? "said by the environment" : `${logprob.toFixed(3)} nats · p ${Math.exp(logprob).toFixed(3)}`;
  return node;
}

// Consecutive tokens of one side: [by the policy, index of the first, of the last].
function turnsOf(sample) {
  const turns = [];
  sample.logprobs.forEach((logprob, i) => {
    const sampled = logprob !== null;
    if (!turns.length || turns.at(-1)[0] !== sampled) turns.push([sampled, i, i]);
    turns.at(-1)[2] = i;
  });
  return turns;
}

// Names of the tools that a text calls in the forms of chat templates, its thoughts
// excluded. Tokens may have other characters for spaces.
function calledTools(text) {
  const said = text.replace(/^[^]*<\/think>/, "").replace(/<think>[^]*/, "");
  const calls = said.matchAll(/<tool_call>(?:[^"<]*<function=|[^]*?"name"[^"]*")(\w+)/g);
  return [...calls].map((found) => found[1]);
}

// Each turn has a separate line, named after its author.
function turnNodes(sample, colored) {
  let called = [];
  return turnsOf(sample).map(([sampled, first, last]) => {
    const tokens = sample.tokens.slice(first, last + 1);
    const body = el("span", { class: "text" });
    body.append(...(colored ? tokens.map((token, i) => tokenNode(token, sample.logprobs[first + i])) : tokens));
    const who = sampled ? "policy" : called.length ? called.join(", ") : "environment";
    called = sampled ? calledTools(tokens.join("")) : [];
    return el("div", { class: sampled ? "turn" : "turn given" }, el("span", { class: "who" }, who), body);
  });
}

function completionNode(sample, colored) {
  const body = el("span", { class: "text long" });
  if (sample.logprobs.includes(null)) {
    body.append(...turnNodes(sample, colored));
    if (sample.hidden_tokens) body.append(` … (${sample.hidden_tokens.toLocaleString("en")} more tokens)`);
  } else if (colored && sample.tokens.length) {
    body.append(...sample.tokens.map((token, i) => tokenNode(token, sample.logprobs[i])));
    if (sample.hidden_tokens) body.append(` … (${sample.hidden_tokens.toLocaleString("en")} more tokens)`);
  } else {
    body.append(sample.completion || "(empty)");
  }
  return el("div", {}, body, sample.reason ? el("div", { class: "why text" }, sample.reason) : null);
}

function sampleRow(sample, colored) {
  const body = completionNode(sample, colored);
  const total = sample.logprobs.reduce((sum, x) => sum + (x || 0), 0);
  return el("tr", { class: "sample" }, el("td", {}, fmt(sample.step)), el("td", {}, fmt(sample.version)),
    el("td", {}, el("span", { class: "text long" }, sample.prompt)), el("td", {}, body),
    el("td", { class: `reward ${sample.reward > 0 ? "good" : ""}` }, fmt(sample.reward)),
    el("td", { class: "reward", style: "font-weight:400" }, sample.tokens.length ? total.toFixed(2) : "–"));
}

// Replaces numbers and quotes, so that similar reasons are counted as one.
function kindOfReason(sample) {
  return sample.reason.replace(/"[^]*"/g, "“…”").replace(/\d+([.,]\d+)*/g, "#").replace(/#(, #)+/g, "#, …").slice(0, 60);
}

function reasonChoice(samples) {
  const counts = new Map();
  for (const sample of samples) if (sample.reason) counts.set(kindOfReason(sample), (counts.get(kindOfReason(sample)) || 0) + 1);
  const kinds = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 20);
  return el("select", { id: "sample-reason", hidden: !kinds.length }, el("option", { value: "" }, "any reason"),
    ...kinds.map(([kind, n]) => el("option", { value: kind }, `${kind} (${n.toLocaleString("en")})`)));
}

function sampleBrowser(bar, node, samples, total) {
  if (!samples.length) { empty(node, "No samples yet."); return; }
  const rewards = [...new Set(samples.map((s) => s.reward).filter((r) => r !== null))].sort((a, b) => a - b);
  const query = el("input", { type: "search", id: "sample-query", placeholder: "prompt, completion or reason contains…", size: 30 });
  const choice = el("select", { id: "sample-reward" }, el("option", { value: "" }, "any reward"),
    el("option", { value: ">0" }, "reward above 0"), el("option", { value: "<=0" }, "reward 0 or below"));
  if (rewards.length > 2 && rewards.length <= 8) rewards.forEach((r) => choice.append(el("option", { value: `=${r}` }, `reward ${fmt(r)}`)));
  const order = el("select", { id: "sample-order" }, el("option", { value: "new" }, "newest first"), el("option", { value: "old" }, "oldest first"),
    el("option", { value: "reward" }, "highest reward first"));
  const colored = el("input", { type: "checkbox", id: "sample-color", checked: true });
  const count = el("span", { id: "sample-count" });
  const why = reasonChoice(samples);
  bar.append(el("label", {}, "find ", query), choice, why, order, el("label", {}, colored, " colour tokens by log-prob"), count);
  const head = el("tr", {}, ...["step", "version", "prompt", "completion", "reward", "log-prob, nats"].map((h) => el("th", {}, h)));
  const body = el("tbody");
  const more = el("button", { type: "button" }, "show more");
  node.replaceChildren(el("table", {}, el("thead", {}, head), body), more);
  let shown = PAGE_SIZE;

  const keeps = { "": () => true, ">0": (s) => s.reward > 0, "<=0": (s) => s.reward !== null && s.reward <= 0 };
  const orders = { new: (a, b) => b.step - a.step, old: (a, b) => a.step - b.step, reward: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || 0 };
  function draw() {
    const text = query.value.toLowerCase();
    const keep = keeps[choice.value] || ((s) => s.reward === Number(choice.value.slice(1)));
    const has = (s) => [s.prompt, s.completion, s.reason].some((part) => part.toLowerCase().includes(text));
    const found = samples.filter((s) => keep(s) && (!why.value || kindOfReason(s) === why.value) && (!text || has(s)));
    found.sort(orders[order.value]);
    body.replaceChildren(...found.slice(0, shown).map((s) => sampleRow(s, colored.checked)));
    if (!found.length) body.append(el("tr", {}, el("td", { colspan: 6 }, el("span", { class: "empty" }, "No sample fits."))));
    more.hidden = found.length <= shown;
    const of = total > samples.length ? ` (held here of ${total.toLocaleString("en")})` : "";
    count.textContent = `${found.length.toLocaleString("en")} of ${samples.length.toLocaleString("en")} samples${of}`;
  }
  const restart = () => { shown = PAGE_SIZE; draw(); };
  query.addEventListener("input", restart);
  for (const input of [choice, why, order, colored]) input.addEventListener("change", restart);
  more.addEventListener("click", () => { shown += 4 * PAGE_SIZE; draw(); });
  draw();
}

// A row per held-out prompt: completions of the first and the last checkpoint.
function sideBySide(bar, node, rows) {
  if (!rows.length) { empty(node, "No evaluation with examples yet."); return; }
  const query = el("input", { type: "search", id: "held-out-query", placeholder: "prompt or completion contains…", size: 30 });
  const choice = el("select", { id: "held-out-choice" }, ...[["all", "all prompts"], ["better", "better at the end"], ["worse", "worse at the end"]]
    .map(([value, words]) => el("option", { value }, words)));
  const count = el("span", { id: "held-out-count" });
  bar.append(el("label", {}, "find ", query), choice, count);
  const body = el("tbody");
  const head = ["prompt", "first checkpoint", "last checkpoint"].map((h) => el("th", {}, h));
  node.replaceChildren(el("table", { class: "sides" }, el("thead", {}, el("tr", {}, ...head)), body));
  const mean = (side) => {
    const rewards = side.map((s) => s.reward).filter((r) => r !== null);
    return rewards.length ? rewards.reduce((sum, r) => sum + r, 0) / rewards.length : null;
  };
  const keeps = { all: () => true, better: (r) => mean(r.after) > mean(r.before), worse: (r) => mean(r.after) < mean(r.before) };
  const one = (sample) => el("div", { class: `one ${sample.reward > 0 ? "right" : ""}` },
    el("span", { class: "reward" }, fmt(sample.reward)), completionNode(sample, true));
  const cell = (side) => side.length
    ? el("td", {}, el("p", { class: "note" }, `mean reward ${fmt(mean(side))}`), ...side.map(one))
    : el("td", {}, el("span", { class: "empty" }, "–"));
  function draw() {
    const text = query.value.toLowerCase();
    const has = (row) => [row, ...row.before, ...row.after].some((s) => `${s.prompt} ${s.completion ?? ""} ${s.reason ?? ""}`.toLowerCase().includes(text));
    const found = rows.filter((row) => keeps[choice.value](row) && (!text || has(row)));
    body.replaceChildren(...found.map((row) => el("tr", { class: "pair" }, el("td", {}, el("span", { class: "text" }, row.prompt)), cell(row.before), cell(row.after))));
    if (!found.length) body.append(el("tr", {}, el("td", { colspan: 3 }, el("span", { class: "empty" }, "No prompt fits."))));
    count.textContent = `${found.length} of ${rows.length} prompts`;
  }
  query.addEventListener("input", draw);
  choice.addEventListener("change", draw);
  draw();
}

function eventTable(node, events) {
  if (!events.length) { empty(node, "Nothing went wrong, or nothing was written."); return; }
  const rows = events.slice(-500).reverse().map((e) => el("tr", {}, el("td", { style: "white-space:nowrap" }, e.t === null ? "–" : fmtTime(e.t)),
    el("td", {}, el("span", { class: `tag ${["restart", "guard", "refusal"].includes(e.kind) ? e.kind : ""}` }, e.kind)), el("td", {}, e.role), el("td", { class: "text" }, e.message)));
  const head = el("tr", {}, ...["time", "kind", "role", "message"].map((h) => el("th", {}, h)));
  node.classList.add("scroll");
  node.replaceChildren(el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}
