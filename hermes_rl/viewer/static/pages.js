// The pages. Each function takes the query of its address and returns what app.js shows.
import { clean, fmt, get, go, h, link, select } from "./app.js";

const text = (value, kind = "") => h(`pre${kind}`, {}, clean(value));
const pair = (name, value, title) => (value === null || value === undefined || value === "" ? null : h("div", { title: title ?? "" }, h("dt", {}, name), h("dd", {}, value)));
const facts = (...pairs) => h("dl.facts", {}, pairs);
const table = (kind, heads, rows) => h("div.scroll", {}, h(`table.${kind}`, {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows)));
const cell = (value, kind) => h(kind ? `td.${kind}` : "td", {}, value ?? "–");
const json = (value) => text(JSON.stringify(value, null, 2), ".code");
const more = (title, ...content) => h("details", {}, h("summary", {}, title), content);
const badge = (value, kind) => h(`span.badge.${kind}`, {}, clean(value));
const verdict = (reward) => (reward === null || reward === undefined ? "none" : reward >= 1 ? "good" : reward > 0 ? "part" : "bad");
const cost = (r) => (!r.unpriced_calls ? fmt.usd(r.cost_usd) : r.cost_usd ? `${fmt.usd(r.cost_usd)} + ${fmt.many(r.unpriced_calls, "call")}` : `unpriced (${fmt.many(r.unpriced_calls, "call")})`);
const ended = (row) => (row.cause && row.cause !== row.end_reason ? `${row.end_reason}: ${row.cause}` : row.end_reason);

// Two attempts, or two runs, are compared: the first is marked, then the second.
const marked = () => JSON.parse(sessionStorage.getItem("mark") ?? "null");
function mark(kind, query, name) {
  const first = marked();
  if (first?.kind === kind && JSON.stringify(first.query) !== JSON.stringify(query)) {
    sessionStorage.removeItem("mark");
    go(kind, { ...first.query, ...Object.fromEntries(Object.entries(query).map(([k, v]) => [`${k}2`, v])) });
    return;
  }
  sessionStorage.setItem("mark", JSON.stringify({ kind, query, name }));
  note();
}
const note = () => {
  const first = marked(), place = document.getElementById("marked");
  if (place) place.replaceChildren(...(first ? [`compare ${clean(first.name)} with… (d on the other one) `, h("button", { onclick: () => { sessionStorage.removeItem("mark"); note(); } }, "cancel")] : []));
};
const chosenRow = () => document.querySelector("[data-row].selected") ?? document.querySelector("[data-row]");

async function runs(query) {
  const { folder, runs: all } = await get("runs", {});
  const wanted = (query.q ?? "").toLowerCase();
  const rows = all.filter((r) => `${r.run} ${r.model ?? ""} ${r.state}`.toLowerCase().includes(wanted));
  const live = all.filter((r) => r.state === "running").length;
  const line = (r) => h("tr", { "data-row": r.run, "data-name": r.run },
    h("td", {}, h("a", { href: link("run", { run: r.run }) }, clean(r.run)), r.error ? h("p.error", {}, clean(r.error)) : null),
    cell(badge(r.state, r.state)),
    cell(r.units ? bar(r.done, r.units, r.given_up) : fmt.count(r.done), "number"),
    cell(r.in_flight ? fmt.count(r.in_flight) : "", "number"),
    cell(r.graded ? `${fmt.count(r.solved)} (${fmt.share(r.solved / r.graded)})` : "–", "number"), cell(fmt.reward(r.mean_reward), "number"),
    cell(fmt.count(r.failed_attempts), "number"), cell(fmt.count(r.tokens), "number"), cell(cost(r), "number"),
    cell(clean(r.model ?? "–")), cell(fmt.when(r.started_at)));
  return {
    crumbs: [], again: live ? 3 : 15, live: live ? `${live} running` : "",
    content: [
      h("h1", {}, "Runs"), h("p.soft", {}, clean(folder)),
      h("p", { id: "marked" }), search(query.q, "filter by name, model or state", (q) => go("runs", { q }, true)),
      table("rows", ["run", "state", "done", "in flight", "solved", "reward", "failed", "tokens", "cost", "model", "started"].map((t, n) => h(n > 1 && n < 9 ? "th.number" : "th", {}, t)), rows.map(line)),
      rows.length ? null : h("p", {}, all.length ? "No run matches." : "No runs in this folder yet. `hermes-rl run` makes one."),
    ].filter(Boolean),
    after: note,
    keys: { d: ["compare the selected run with another", () => { const r = chosenRow()?.dataset.row; if (r) mark("rundiff", { run: r }, r); }] },
  };
}
function bar(done, units, lost) {
  const inner = h("i"), track = h("span.bar", { title: `${done} of ${units} done${lost ? `, ${lost} given up` : ""}` }, inner);
  inner.style.width = `${Math.min(100, (100 * done) / units)}%`;
  return [track, ` ${fmt.count(done)}/${fmt.count(units)}`];
}
function search(value, hint, change) {
  return h("form.filters", { onsubmit: (e) => { e.preventDefault(); change(e.target.elements.search.value); } },
    h("input", { type: "search", name: "search", value: value ?? "", placeholder: hint, "aria-label": hint, onchange: (e) => change(e.target.value) }));
}

const COLUMNS = [["task", "task_id"], ["#", "attempt"], ["reward", "reward"], ["ending", "end_reason"], ["turns", "turns"], ["tool errors", "tool_errors"], ["tokens", "total_tokens"], ["cost", "cost_usd"], ["time", "total_s"], ["started", "started_at"]];
async function run(query) {
  const [info, found] = await Promise.all([get("run", { run: query.run }), get("units", query)]);
  const to = (changes) => go("run", { ...query, offset: "", ...changes }, true);
  const pick = (name, label, options) => h("select", { name, "aria-label": label, onchange: (e) => to({ [name]: e.target.value }) },
    h("option", { value: "" }, label), options.map(([value, shown]) => h("option", { value, selected: query[name] === value }, shown)));
  const field = (name, hint, kind) => h("input", { type: kind ?? "text", name, value: query[name] ?? "", placeholder: hint, "aria-label": hint, onchange: (e) => to({ [name]: e.target.value }) });
  const counted = (values) => values.map((v) => [v.values, `${v.values} (${fmt.count(v.counts)})`]);
  const filters = h("form.filters", { onsubmit: (e) => e.preventDefault() },
    field("q", "text in the conversation  /", "search"), field("task", "task or id"),
    pick("reward", "any reward", [["solved", "solved (≥ 1)"], ["partial", "between 0 and 1"], ["failed", "failed (≤ 0)"], ["none", "ungraded"]]),
    pick("end", "any ending", counted(info.ends)), pick("cause", "any cause", counted(info.causes)),
    pick("status", "all attempts", [["ok", "finished"], ["failed", "failed"], ["cancelled", "cancelled"]]),
    h("label", {}, h("input", { type: "checkbox", name: "errors", checked: !!query.errors, onchange: (e) => to({ errors: e.target.checked ? "1" : "" }) }), " tool errors"),
    h("a", { href: link("run", { run: query.run }) }, "clear"));
  const sort = query.sort ?? "";
  const heads = COLUMNS.map(([name, column], n) => h(n > 1 && n !== 3 ? "th.number" : "th", { "aria-sort": sort.replace("-", "") === column ? (sort[0] === "-" ? "descending" : "ascending") : null },
    h("a", { href: link("run", { ...query, offset: "", sort: sort === `-${column}` ? column : `-${column}` }) }, name, sort.replace("-", "") === column ? (sort[0] === "-" ? " ↓" : " ↑") : "")));
  sessionStorage.setItem("list", JSON.stringify({ run: query.run, query, ids: found.rows.map((r) => r.trajectory_id) }));
  const line = (r) => h("tr", { "data-row": r.trajectory_id, "data-name": `${r.task_id} #${r.repeat}` },
    h("td.task", {}, h("a", { href: link("unit", { run: query.run, id: r.trajectory_id }) }, clean(r.task_id)), r.error ? h("p.error.clip", { title: clean(r.error) }, clean(r.error)) : null),
    cell(r.attempt ? `${r.repeat} (attempt ${r.attempt + 1})` : r.repeat), cell(badge(fmt.reward(r.reward), verdict(r.reward)), "number"), cell(clean(ended(r))),
    cell(fmt.count(r.turns), "number"), cell(r.tool_errors ? fmt.count(r.tool_errors) : "", "number"), cell(fmt.count(r.total_tokens), "number"),
    cell(fmt.usd(r.cost_usd), "number"), cell(fmt.seconds(r.total_s), "number"), cell(fmt.when(r.started_at / 1e6), "number"));
  const last = found.offset + found.rows.length;
  const page = (step) => () => { const offset = found.offset + step * 100; if (offset >= 0 && offset < found.found) go("run", { ...query, offset: offset || "" }); };
  const solved = info.graded ? `${fmt.count(info.solved)} of ${fmt.count(info.graded)} (${fmt.share(info.solved / info.graded)})` : "not graded";
  return {
    crumbs: [[query.run]], again: found.unsearched ? 0.3 : info.state === "running" ? 3 : 0,
    live: info.state === "running" ? `${fmt.count(info.in_flight)} in flight` : "",
    content: [
      h("h1", {}, clean(query.run), " ", badge(info.state, info.state)),
      info.error ? h("p.error", {}, clean(info.error)) : null,
      (info.trouble ?? []).map((one) => h("p.error", {}, clean(`${one.endpoint ?? ""} ${one.detail ?? JSON.stringify(one)}`))),
      facts(pair("done", info.units ? bar(info.done, info.units, info.given_up) : fmt.count(info.done)), pair("solved", solved), pair("mean reward", fmt.reward(info.mean_reward)),
        pair("failed attempts", fmt.count(info.failed_attempts)), pair("tokens", fmt.count(info.tokens)), pair("cost", cost(info)), pair("model", clean(info.model ?? "–")), pair("started", fmt.when(info.started_at))),
      h("p.links", {}, info.has_groups ? h("a", { href: link("groups", { run: query.run }) }, "groups and advantages") : null,
        h("button", { onclick: () => mark("rundiff", { run: query.run }, query.run) }, "compare with another run")),
      h("p", { id: "marked" }), filters,
      h("p.soft", { role: "status" }, found.unsearched ? `${fmt.count(found.found)} found, ${fmt.many(found.unsearched, "row")} still to search…` : `${fmt.count(found.found)} of ${fmt.many(found.total, "attempt")}`),
      table("rows.units", heads, found.rows.map(line)),
      h("p.pages", {}, h("button", { onclick: page(-1), disabled: !found.offset }, "← previous"), ` ${found.found ? fmt.count(found.offset + 1) : 0} to ${fmt.count(last)} of ${fmt.count(found.found)} `, h("button", { onclick: page(1), disabled: last >= found.found }, "next →")),
      more("configuration, versions, starts", json(info.manifest)),
    ].flat().filter(Boolean),
    after: note,
    keys: {
      "[": ["previous page", page(-1)], "]": ["next page", page(1)],
      d: ["compare the selected attempt with another", () => { const r = chosenRow(); if (r) mark("diff", { run: query.run, id: r.dataset.row }, r.dataset.name); }],
      g: ["groups", () => go("groups", { run: query.run })],
    },
  };
}

const unitOf = (query) => ({ run: query.run, id: query.id, sub: query.sub ?? "" });
async function unit(query) {
  const start = Number(query.from ?? 0), place = unitOf(query);
  const [head, page] = await Promise.all([get("unit", place), get("messages", { ...place, from: start })]);
  const calls = Map.groupBy ? Map.groupBy(head.calls, (c) => c.turn) : head.calls.reduce((m, c) => m.set(c.turn, [...(m.get(c.turn) ?? []), c]), new Map());
  const starts = new Map(head.contexts.filter((c) => c.start).map((c) => [c.start, c]));
  let turn = start ? page.messages[0]?.info.turn : -1;
  const steps = page.messages.flatMap((m) => {
    const fresh = m.info.turn !== turn && m.info.turn > 0;
    turn = m.info.turn;
    return [starts.has(m.at) ? h("p.context", {}, `context compressed to ${fmt.many(starts.get(m.at).kept.length, "message")} (${starts.get(m.at).reason})`) : null,
      fresh ? turnLine(turn, calls.get(turn) ?? []) : null, message(m, place)];
  }).filter(Boolean);
  const list = JSON.parse(sessionStorage.getItem("list") ?? "null"), ids = list?.run === query.run ? list.ids : [];
  const beside = (step) => { const id = ids[ids.indexOf(query.id) + step]; return id && ids.includes(query.id) ? () => go("unit", { run: query.run, id }, true) : null; };
  const jump = (from) => go("unit", { ...query, from: from || "", m: "" });
  const end = start + page.messages.length, size = 60;
  const pageLine = () => head.count > size ? h("p.pages", {}, h("button", { disabled: !start, onclick: () => jump(Math.max(0, start - size)) }, "← earlier"), ` messages ${start + 1} to ${end} of ${fmt.count(head.count)} `, h("button", { disabled: end >= head.count, onclick: () => jump(end) }, "later →")) : null;
  const t = head.timing ?? {}, u = head.usage ?? {};
  const name = `${head.task_id} #${head.repeat}`;
  return {
    crumbs: [[query.run, link("run", list?.run === query.run ? list.query : { run: query.run })], [query.sub ? `${name}, sub-agent` : name]],
    content: [
      h("h1", {}, named(head), " ", badge(`reward ${fmt.reward(head.reward)}`, verdict(head.reward)), " ", badge(ended(head), head.status === "ok" ? "none" : "bad")),
      head.error ? text(head.error, ".error") : null,
      facts(pair("turns", fmt.count(head.turns)), pair("tokens in", fmt.count(u.input_tokens), `${fmt.count(u.cache_read_tokens)} from cache`), pair("from cache", u.cache_read_tokens ? fmt.count(u.cache_read_tokens) : null), pair("tokens out", fmt.count(u.output_tokens)),
        pair("of it reasoning", u.reasoning_tokens ? fmt.count(u.reasoning_tokens) : null), pair("cost", cost(head)), pair("time", fmt.seconds(t.total_s)), pair("model", clean(head.model || "–")), pair("attempt", head.attempt + 1), pair("unit", h("code", {}, head.unit_id.slice(0, 12)))),
      timeline(t),
      h("p.links", {}, ids.length ? [h("button", { onclick: beside(-1), disabled: !beside(-1) }, "← previous"), h("button", { onclick: beside(1), disabled: !beside(1) }, "next →")] : null,
        head.others.length > 1 ? more(`${fmt.many(head.others.length, "attempt")} of this task`, h("ul", {}, head.others.map((o) => h("li", {}, h("a", { href: link("unit", { run: query.run, id: o.trajectory_id }) }, `#${o.repeat} attempt ${o.attempt + 1}`), " ", badge(fmt.reward(o.reward), verdict(o.reward)), ` ${o.end_reason} `, o.trajectory_id === query.id ? "(this one)" : h("a", { href: link("diff", { run: query.run, id: query.id, run2: query.run, id2: o.trajectory_id }) }, "compare"))))) : null,
        head.subagents.length ? more(fmt.many(head.subagents.length, "sub-agent"), h("ul", {}, head.subagents.map((s) => h("li", {}, h("a", { href: link("unit", { ...query, sub: s.trajectory_id, from: "" }) }, clean(s.task_prompt.slice(0, 120) || s.trajectory_id)), ` ${fmt.many(s.turns, "turn")}, ${s.end_reason}`)))) : null,
        head.segments.length ? h("a", { href: link("tokens", { run: query.run, id: query.id }) }, `tokens: ${fmt.many(head.segments.length, "segment")}`) : null,
        h("button", { onclick: () => mark("diff", { run: query.run, id: query.id }, name) }, "compare with another attempt")),
      h("p", { id: "marked" }),
      grading(head), pageLine(),
      h("section.steps", {}, steps), pageLine(),
      more("tools, sampling, sandbox, metadata", json({ tools: parsed(head.tools), sampling: head.sampling, seed: head.seed, sandbox: head.sandbox, endpoint: head.endpoint, api_mode: head.api_mode, served_models: head.served_models, metadata: head.metadata, tool_stats: head.tool_stats, metrics: head.metrics })),
    ].filter(Boolean),
    after() {
      note();
      const wanted = query.m !== undefined && document.getElementById(`m${query.m}`);
      if (wanted) { select([...document.querySelectorAll("[data-row]")].indexOf(wanted)); wanted.scrollIntoView(); }
    },
    keys: {
      n: ["next attempt of the list", () => beside(1)?.()], p: ["previous attempt of the list", () => beside(-1)?.()],
      "]": ["later messages", () => end < head.count && jump(end)], "[": ["earlier messages", () => start && jump(Math.max(0, start - size))],
      e: ["open or close all", () => { const all = [...document.querySelectorAll(".steps details")], open = all.some((d) => !d.open); all.forEach((d) => { d.open = open; }); }],
      d: ["compare with another attempt", () => mark("diff", { run: query.run, id: query.id }, name)],
    },
  };
}
const parsed = (value) => { try { return typeof value === "string" ? JSON.parse(value) : value; } catch { return value; } };
const PHASES = [["queued_s", "queued"], ["sandbox_s", "sandbox"], ["model_s", "model"], ["tool_s", "tools"], ["waiting_s", "waiting"], ["verify_s", "verifier"]];
function timeline(t) {
  const parts = PHASES.filter(([key]) => t[key] > 0.005), whole = parts.reduce((s, [key]) => s + t[key], 0);
  if (!whole) return null;
  return h("div.timeline", { role: "img", "aria-label": "time by phase" }, parts.map(([key, name]) => {
    const part = h(`span.${name}`, { title: `${name} ${fmt.seconds(t[key])}` }, t[key] / whole > 0.08 ? `${name} ${fmt.seconds(t[key])}` : "");
    part.style.flex = `${t[key] / whole} 1 0`;
    return part;
  }));
}
function turnLine(turn, calls) {
  const sum = (key) => (calls.every((c) => c[key] === null) ? null : calls.reduce((s, c) => s + (c[key] ?? 0), 0));
  const failed = calls.filter((c) => c.error), retries = sum("retries");
  return h("div.turn", {}, h("b", {}, `turn ${turn}`), calls.length ? [
    h("span", {}, `${fmt.count(sum("input_tokens"))} in${sum("cache_read_tokens") ? ` (${fmt.count(sum("cache_read_tokens"))} cached)` : ""}, ${fmt.count(sum("output_tokens"))} out${sum("reasoning_tokens") ? ` (${fmt.count(sum("reasoning_tokens"))} reasoning)` : ""}`),
    h("span", {}, fmt.usd(sum("cost_usd"))), h("span", {}, fmt.seconds(sum("latency_s"))),
    retries ? h("span.bad", {}, retries === 1 ? "1 retry" : `${retries} retries`) : null,
    calls.map((c) => (c.finish_reason && !["stop", "tool_calls"].includes(c.finish_reason) ? badge(c.finish_reason, "part") : null)),
    failed.map((c) => h("span.bad", {}, clean(`${c.outcome}: ${c.error}`)))] : null);
}
function grading(head) {
  if (!head.rewards?.length) return null;
  return h("section.grading", {}, h("h2", {}, "Grading"), head.rewards.map((part) => h("details", { open: head.rewards.length < 4 },
    h("summary", {}, clean(part.name), " ", badge(fmt.reward(part.score), verdict(part.score)), part.weight !== 1 ? ` weight ${part.weight}` : "", part.turn ? ` turn ${part.turn}` : ""),
    part.detail ? long(part.detail) : h("p.soft", {}, "no output"))));
}

function message({ at, message: m, info, replaced }, place) {
  const marks = [info.synthetic ? "written by the harness" : null, replaced ? "replaced by compression" : null, info.tool_name, info.tool_ok === false ? "error" : null].filter(Boolean);
  const whole = async (event) => {
    const { messages } = await get("messages", { ...place, from: at, whole: 1 });
    event.target.closest("article").replaceWith(message(messages[0], place));
  };
  const body = [
    m.reasoning_content ? h("details.reasoning", { open: true }, h("summary", {}, "reasoning"), long(m.reasoning_content, whole)) : null,
    m.role === "tool" ? toolOutput(m.content, whole) : content(m.content, place, whole),
    (m.tool_calls ?? []).map((call) => toolCall(call, whole)),
  ];
  const folded = m.role === "system";
  return h(`article.${m.role.replace(/[^a-z]/g, "")}${info.tool_ok === false ? ".failed" : ""}`, { id: `m${at}`, "data-row": at },
    h("h3", {}, h("a", { href: link("unit", { run: place.run, id: place.id, sub: place.sub, from: Math.floor(at / 60) * 60 || "", m: at }), title: "link to this message" }, clean(m.role)), marks.map((one) => h("small", {}, clean(one)))),
    folded ? h("details", {}, h("summary", {}, fmt.many(info.chars, "character")), body) : body);
}
function content(value, place, whole) {
  if (!Array.isArray(value)) return value ? long(value, whole) : null;
  return value.map((part) => {
    if (part.type === "text") return long(part.text ?? "", whole);
    if (Number.isInteger(part.image)) return h("img", { src: `/api/image?${new URLSearchParams({ ...place, n: part.image })}`, alt: `image ${part.image}`, loading: "lazy" });
    if (part.type === "image") return h("p.soft", {}, clean(`image at ${part.address ?? "an unknown place"}`));
    return json(part);
  });
}
function long(value, whole) {
  if (value === null || typeof value !== "object") {
    const shown = clean(value ?? ""), lines = shown.split("\n").length;
    if (lines <= 40 && shown.length <= 6000) return text(value);
    const part = h("div.folded", {}, text(value), h("button", { onclick: () => part.classList.toggle("folded") }, `${fmt.count(lines)} lines: fold or unfold`));
    return part;
  }
  if ("cut" in value) return [long(value.text, whole), h("button", { onclick: whole }, `show all ${fmt.count(value.cut)} characters`)];
  return json(value);
}
function toolOutput(value, whole) {
  const inner = typeof value === "string" ? parsed(value) : value;
  if (inner === null || typeof inner !== "object" || !("output" in inner)) return Array.isArray(value) ? content(value, {}, whole) : long(value, whole);
  const { output, exit_code: code, error, ...rest } = inner;
  return [output ? long(output, whole) : h("p.soft", {}, "no output"), code ? badge(`exit ${code}`, "bad") : null, error ? text(error, ".error") : null, Object.keys(rest).length ? more("more", json(rest)) : null];
}
function toolCall(call, whole) {
  const { name, arguments: given } = call.function ?? {};
  const entries = given && typeof given === "object" && !("cut" in given) ? Object.entries(given) : [["", given]];
  return h("div.call", {}, h("b", {}, clean(name ?? "?")), entries.map(([key, value]) =>
    h("div", {}, key && !(name === "terminal" && key === "command") ? h("small", {}, clean(key)) : null, long(typeof value === "string" || value?.cut ? value : JSON.stringify(value), whole))));
}

async function groups(query) {
  const found = await get("groups", query);
  const to = (changes) => go("groups", { ...query, offset: "", ...changes }, true);
  const page = (step) => () => { const offset = found.offset + step * 100; if (offset >= 0 && offset < found.found) go("groups", { ...query, offset: offset || "" }); };
  const line = (g) => h("tr", { "data-row": g.group_id }, h("td.task", {}, h("a", { href: link("run", { run: query.run, task: g.group_id }) }, clean(g.task_id)), g.error ? h("p.error", {}, clean(g.error)) : null),
    cell(`${g.n_valid} of ${g.size}`, "number"), cell(fmt.reward(g.mean), "number"), cell(fmt.reward(g.std), "number"),
    h("td", {}, h("div.members", {}, g.members.map((member, n) => h("a", { href: g.trajectory_ids[n] ? link("unit", { run: query.run, id: g.trajectory_ids[n] }) : null, title: g.why_invalid[n] ? clean(g.why_invalid[n]) : `reward ${fmt.reward(g.rewards[n])}, GRPO ${fmt.reward(g.grpo[n])}, RLOO ${fmt.reward(g.rloo[n])}, Dr. GRPO ${fmt.reward(g.dr_grpo[n])}` },
      badge(fmt.reward(g.rewards[n]), g.valid[n] ? verdict(g.rewards[n]) : "none"), h("small", {}, g.grpo[n] === null ? "–" : (g.grpo[n] > 0 ? "+" : "") + g.grpo[n].toFixed(2)))))),
    cell(g.equal_scores ? badge("no gradient", "part") : ""), cell(clean(g.scored_by)));
  return {
    crumbs: [[query.run, link("run", { run: query.run })], ["groups"]],
    content: [
      h("h1", {}, "Groups"), h("p.soft", {}, "The repeats of one task: reward, and below it the GRPO advantage; point at one for RLOO and Dr. GRPO."),
      h("form.filters", { onsubmit: (e) => e.preventDefault() }, h("input", { type: "search", name: "task", value: query.task ?? "", placeholder: "task", "aria-label": "task", onchange: (e) => to({ task: e.target.value }) }),
        h("label", {}, h("input", { type: "checkbox", checked: !!query.equal, onchange: (e) => to({ equal: e.target.checked ? "1" : "" }) }), " only equal scores")),
      table("rows", ["task", "valid", "mean", "std", "members", "", "scored by"].map((t, n) => h(n > 0 && n < 4 ? "th.number" : "th", {}, t)), found.rows.map(line)),
      h("p.pages", {}, h("button", { onclick: page(-1), disabled: !found.offset }, "← previous"), ` ${found.found ? found.offset + 1 : 0} to ${found.offset + found.rows.length} of ${fmt.count(found.found)} `, h("button", { onclick: page(1), disabled: found.offset + found.rows.length >= found.found }, "next →")),
    ],
    keys: { "[": ["previous page", page(-1)], "]": ["next page", page(1)] },
  };
}

async function tokens(query) {
  const branch = Number(query.branch ?? 0), from = Number(query.from ?? 0);
  const [head, seg] = await Promise.all([get("unit", unitOf(query)), get("tokens", { ...unitOf(query), branch, from })]);
  const kind = (n) => (seg.loss_mask[n] ? "trained" : seg.sampled_mask[n] ? "sampled" : "prompt");
  const texts = query.ids ? null : seg.texts, shape = (text) => (text === null ? "…" : clean(text).replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅");
  const spans = seg.input_ids.map((id, n) => {
    const known = seg.logprobs[n], span = h(`span.${kind(n)}${texts ? ".text" : ""}`, { title: `id ${id}, position ${from + n}, turn ${seg.turn_ids[n]}, ${kind(n)}${known === null || known === undefined ? "" : `, logprob ${known.toFixed(4)}`}${seg.version_ids[n] >= 0 ? `, version ${seg.version_ids[n]}` : ""}` }, texts ? shape(texts[n]) : String(id));
    if (known !== null && known !== undefined) span.style.setProperty("--p", Math.exp(known).toFixed(3));
    return span;
  });
  const jump = (start) => go("tokens", { ...query, from: start || "" });
  return {
    crumbs: [[query.run, link("run", { run: query.run })], [`${head.task_id} #${head.repeat}`, link("unit", unitOf(query))], ["tokens"]],
    content: [
      h("h1", {}, "Tokens"),
      h("p.links", {}, head.segments.map((s, n) => h(n === branch ? "b" : "a", { href: n === branch ? null : link("tokens", { ...query, branch: n, from: "" }) }, `segment ${n}: ${s.branch_kind}${s.fork_reason ? ` (${s.fork_reason})` : ""}`))),
      facts(pair("tokens", fmt.count(seg.tokens)), pair("prompt", fmt.count(seg.prompt_len)), pair("sampled", fmt.count(seg.n_sampled)), pair("trained", fmt.count(seg.trained)), pair("source", seg.token_source), pair("trainable", seg.trainable ? "yes" : clean(`no: ${seg.exclude_reason}`)), pair("agent", clean(seg.agent_name)), pair("versions", seg.policy_version_min ? clean(`${seg.policy_version_min} to ${seg.policy_version_max}`) : null)),
      h("p.legend", {}, h("span.trained", {}, "trained"), h("span.sampled", {}, "sampled, not trained"), h("span.prompt", {}, "not sampled"), " the bar below a token is its probability; point at it for id, turn, logprob and version"),
      h("p.soft", {}, seg.texts ? h("a", { href: link("tokens", { ...query, ids: query.ids ? "" : "1" }) }, query.ids ? "show texts" : "show ids") : "Ids, since the tokenizer (endpoint.tokenizer) is not on this machine"),
      h("div.tokens", {}, spans.flatMap((span, n) => (texts?.[n]?.endsWith("\n") ? [span, h("br")] : [span]))),
      h("p.pages", {}, h("button", { disabled: !from, onclick: () => jump(Math.max(0, from - seg.page)) }, "← earlier"), ` ${fmt.count(from)} to ${fmt.count(from + seg.input_ids.length)} `, h("button", { disabled: from + seg.page >= seg.tokens, onclick: () => jump(from + seg.page) }, "later →")),
    ],
    keys: { "]": ["later tokens", () => from + seg.page < seg.tokens && jump(from + seg.page)], "[": ["earlier tokens", () => from && jump(Math.max(0, from - seg.page))] },
  };
}

const KINDS = { "+": "added", "-": "removed", "…": "note" };
const diffLines = (all) => h("pre.diff", {}, all.map(([sign, line]) => h(`span.${KINDS[sign] ?? "same"}`, {}, `${sign} ${clean(line)}\n`)));
// Of many added or removed lines, those after the first 40 are folded.
function lines(all) {
  const parts = [];
  for (const line of all) {
    const last = parts[parts.length - 1];
    if (last?.[0][0] === line[0]) last.push(line); else parts.push([line]);
  }
  return parts.map((part) => part.length < 50 ? diffLines(part) : [diffLines(part.slice(0, 40)), h("details", {}, h("summary", {}, `${fmt.count(part.length - 40)} more lines`), diffLines(part.slice(40)))]);
}
const named = (row) => [h("bdi", {}, clean(row.task_id)), ` #${row.repeat}`];
async function diff(query) {
  const found = await get("diff/units", query), [a, b] = found.heads;
  const side = (head, run, id, name) => h("div", {}, h("h2", {}, `${name}: `, h("a", { href: link("unit", { run, id }) }, named(head)), " ", badge(fmt.reward(head.reward), verdict(head.reward))),
    h("p.soft", {}, clean(run)), facts(pair("ending", clean(ended(head))), pair("turns", head.turns), pair("tokens", fmt.count(head.total_tokens)), pair("cost", fmt.usd(head.cost_usd)), pair("time", fmt.seconds(head.total_s)), pair("model", clean(head.model || "–"))), head.error ? h("p.error", {}, clean(head.error)) : null, grading(head));
  const at = (step, key, run, id) => h("a", { href: link("unit", { run, id, from: Math.floor(step[key] / 60) * 60 || "", m: step[key] }) }, `${key.toUpperCase()} ${step[key]}`);
  const steps = found.steps.map((s) => s.op === "equal" ? h("p.context", { "data-row": 1 }, `${fmt.many(s.count, "equal message")}: `, at(s, "a", query.run, query.id), " ", at(s, "b", query.run2, query.id2))
    : s.op === "change" ? h("article", { "data-row": 1 }, h("h3", {}, clean(s.role), h("small", {}, at(s, "a", query.run, query.id), " ", at(s, "b", query.run2, query.id2))), lines(s.lines))
      : h(`article.only.${s.side}`, { "data-row": 1 }, h("h3", {}, clean(s.role), h("small", {}, `only in ${s.side.toUpperCase()}`)), lines(s.text.split("\n").map((l) => [s.side === "a" ? "-" : "+", l]))));
  return { crumbs: [[query.run, link("run", { run: query.run })], ["compare attempts"]], content: [h("h1", {}, "Two attempts"), h("div.sides", {}, side(a, query.run, query.id, "A"), side(b, query.run2, query.id2, "B")), h("section.steps", {}, steps)] };
}
async function rundiff(query) {
  const found = await get("diff/runs", query), [a, b] = found.results;
  const value = (v) => (v === null || v === undefined ? h("i.soft", {}, "not set") : clean(typeof v === "object" ? JSON.stringify(v) : v));
  const share = (r) => (r.graded ? `${r.solved} of ${r.graded} (${fmt.share(r.solved / r.graded)})` : "not graded");
  const figures = [["units done", (r) => [fmt.count(r.done), r.unfinished ? h("p.error", {}, r.unfinished) : null]], ["solved", share], ["mean reward", (r) => fmt.reward(r.mean_reward)], ["failed attempts", (r) => fmt.count(r.failed_attempts)], ["mean turns", (r) => fmt.reward(r.mean_turns)], ["tokens", (r) => fmt.count(r.tokens)], ["cost", cost], ["mean time", (r) => fmt.seconds(r.mean_seconds)]];
  const heads = () => ["", clean(query.run), clean(query.run2)].map((t) => h("th", {}, t));
  const tasks = found.tasks, listed = (name, key) => (tasks[key].length ? more(`${fmt.many(tasks.counts[key], "task")} ${name}`, h("ul", {}, tasks[key].map((t) => h("li", {}, clean(t)))), tasks.counts[key] > tasks[key].length ? h("p.soft", {}, `and ${fmt.count(tasks.counts[key] - tasks[key].length)} more`) : null) : null);
  return {
    crumbs: [["compare runs"]],
    content: [
      h("h1", {}, "Two runs"),
      h("h2", {}, "Results"), table("plain", heads(), figures.map(([name, of]) => h("tr", {}, h("th", {}, name), cell(of(a)), cell(of(b))))),
      h("h2", {}, "Settings"), found.settings.length ? table("plain", heads(), found.settings.map((s) => h("tr", {}, h("th", {}, clean(s.name)), cell(value(s.a)), cell(value(s.b))))) : h("p", {}, "All settings and versions are equal."),
      h("h2", {}, "Tasks"), h("p", {}, `${fmt.count(tasks.common)} in both`), listed("only in the first", "only_a"), listed("only in the second", "only_b"), listed("with other content", "edited"),
      h("h2", {}, "Prompt and tools"), found.prompt.length || found.tools.length ? [found.prompt.length ? lines(found.prompt) : null, found.tools.length ? lines(found.tools) : null] : h("p", {}, "Equal for the first common task."),
      h("h2", {}, `Tasks with another mean reward: ${fmt.count(found.changed_count)}`),
      table("rows", ["task", clean(query.run), clean(query.run2)].map((t) => h("th", {}, t)), found.changed.map((t) => h("tr", { "data-row": t.task_id }, cell(clean(t.task_id), "task"), ...["a", "b"].map((s) => h("td", {}, h("a", { href: link("run", { run: s === "a" ? query.run : query.run2, task: t.task_id }) }, badge(fmt.reward(t[s].reward), verdict(t[s].reward)), ` ${fmt.many(t[s].units, "unit")}`)))))),
    ].flat(Infinity).filter(Boolean),
  };
}

export const pages = { runs, run, unit, groups, tokens, diff, rundiff };
