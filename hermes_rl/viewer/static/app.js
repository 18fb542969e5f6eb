// The frame of the viewer: elements, requests, routes, keys. All text becomes text nodes, never HTML.
import { pages } from "./pages.js";

export function h(tag, options, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(options ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && key !== "list") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

// Control characters, and those that reorder or hide text, become visible.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|\p{Surrogate}|[\u{e0000}-\u{e007f}]/gu;
const SGR = /\u001b\[[0-9;]*m/g; // colours of terminals carry no text
export function clean(text) {
  return String(text).replace(/\r\n/g, "\n").replace(SGR, "").replace(HIDDEN, (c) => `⟨${c.codePointAt(0).toString(16).padStart(4, "0")}⟩`);
}

export const fmt = {
  count: (n) => (n === null || n === undefined ? "–" : n.toLocaleString("en-US")),
  many: (n, what) => `${fmt.count(n)} ${what}${n === 1 ? "" : "s"}`,
  reward: (n) => (n === null || n === undefined ? "–" : String(Math.round(n * 1000) / 1000)),
  usd: (n) => (n === null || n === undefined ? "–" : n >= 100 ? `$${Math.round(n).toLocaleString("en-US")}` : `$${n.toFixed(n >= 1 || !n ? 2 : 4)}`),
  share: (n) => (n === null || n === undefined ? "–" : `${Math.round(n * 100)}%`),
  seconds(n) {
    if (n === null || n === undefined) return "–";
    if (n < 60) return `${n.toFixed(1)} s`;
    const s = Math.round(n), parts = [Math.floor(s / 3600), Math.floor(s / 60) % 60, s % 60];
    return (parts[0] ? [parts[0], String(parts[1]).padStart(2, "0")] : [parts[1]]).concat(String(parts[2]).padStart(2, "0")).join(":");
  },
  when: (unix) => (unix ? new Date(unix * 1000).toISOString().slice(0, 16).replace("T", " ") : "–"),
};

export async function get(path, query) {
  const answer = await fetch(`/api/${path}?${new URLSearchParams(query)}`);
  const text = await answer.text();
  if (!answer.ok) {
    let why = text;
    try { why = JSON.parse(text).error; } catch { /* plain text */ }
    throw new Error(why);
  }
  return JSON.parse(text);
}

// A deep link: #NAME?KEY=VALUE; empty values are left out.
export function link(name, query) {
  const kept = Object.entries(query ?? {}).filter(([, v]) => v !== "" && v !== null && v !== undefined && v !== false);
  const text = new URLSearchParams(kept).toString();
  return `#${name}${text ? `?${text}` : ""}`;
}
export function route() {
  const [name, text] = location.hash.slice(1).split("?", 2);
  return { name: name || "runs", query: Object.fromEntries(new URLSearchParams(text ?? "")) };
}
export function go(name, query, replace) {
  const target = link(name, query);
  if (replace) { history.replaceState(null, "", target); show(); } else location.hash = target;
}

const main = document.getElementById("page");
let shown = 0, timer = null, keys = {};

// What a page returns: crumbs, content (nodes), keys, and seconds until it is loaded again.
export async function show(quiet) {
  const number = ++shown;
  clearTimeout(timer);
  const { name, query } = route();
  document.getElementById("live").textContent = quiet ? "" : "loading…";
  try {
    const page = await (pages[name] ?? pages.runs)(query);
    if (number !== shown) return;
    keys = page.keys ?? {};
    crumbs(page.crumbs);
    const place = window.scrollY, typed = document.activeElement?.name, active = document.activeElement;
    const caret = typed && active.tagName === "INPUT" ? [active.value, active.selectionStart] : null;
    const chosen = quiet ? selected() : null;
    main.replaceChildren(...page.content);
    if (quiet) window.scrollTo(0, place);
    if (chosen !== null) select(chosen, true);
    const field = typed && main.querySelector(`[name="${typed}"]`);
    if (field && caret) { field.value = caret[0]; field.focus(); field.setSelectionRange(caret[1], caret[1]); }
    document.getElementById("live").textContent = page.live ?? "";
    page.after?.();
    document.body.dataset.shown = location.hash;
    if (page.again) timer = setTimeout(() => show(true), page.again * 1000);
  } catch (error) {
    if (number !== shown) return;
    if (quiet) { document.getElementById("live").textContent = "no answer from hermes-rl view"; timer = setTimeout(() => show(true), 5000); return; }
    keys = {};
    crumbs([]);
    document.getElementById("live").textContent = "";
    document.body.dataset.shown = location.hash;
    main.replaceChildren(h("p.error", { role: "alert" }, clean(error.message)));
  }
}
function crumbs(parts) {
  const all = [["runs", link("runs")], ...parts];
  document.getElementById("crumbs").replaceChildren(...all.map(([text, target], n) =>
    n < all.length - 1 ? h("a", { href: target }, clean(text)) : h("b", {}, clean(text))));
  document.title = clean(all.map(([text]) => text).slice(-2).reverse().join(" · "));
}

// The selected row of the list on the page: [data-row].
const rows = () => [...main.querySelectorAll("[data-row]")];
const selected = () => { const n = rows().findIndex((row) => row.classList.contains("selected")); return n < 0 ? null : n; };
export function select(n, still) {
  const all = rows();
  if (!all.length) return;
  const at = Math.max(0, Math.min(n, all.length - 1));
  all.forEach((row, i) => row.classList.toggle("selected", i === at));
  if (!still) all[at].scrollIntoView({ block: "nearest" });
}
const COMMON = {
  j: ["next row or message", () => select((selected() ?? -1) + 1)],
  k: ["previous row or message", () => select((selected() ?? 1) - 1)],
  Enter: ["open the selected row", () => rows()[selected() ?? 0]?.querySelector("a")?.click()],
  u: ["up to the list", () => { const ups = document.querySelectorAll("#crumbs a"); ups[ups.length - 1]?.click(); }],
  "/": ["search", () => main.querySelector("input[type=search]")?.focus()],
  t: ["light or dark", theme],
  "?": ["this list", help],
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (typing) { if (event.key === "Escape") event.target.blur(); return; }
  if (event.key === "Enter" && /^(A|BUTTON|SUMMARY)$/.test(event.target.tagName)) return;
  if (document.getElementById("keys").open && event.key !== "?") return;
  const found = keys[event.key] ?? COMMON[event.key];
  if (found) { event.preventDefault(); found[1](); }
});
function help() {
  const dialog = document.getElementById("keys");
  if (dialog.open) { dialog.close(); return; }
  const lines = Object.entries({ ...COMMON, ...keys }).map(([key, [text]]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]);
  dialog.replaceChildren(h("h2", {}, "Keyboard"), h("dl", {}, lines), h("button", { onclick: () => dialog.close() }, "close"));
  dialog.showModal();
}
function theme() {
  const dark = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const next = dark === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("theme", next);
}
if (localStorage.getItem("theme")) document.documentElement.dataset.theme = localStorage.getItem("theme");
document.getElementById("theme").addEventListener("click", theme);
document.getElementById("help").addEventListener("click", help);
addEventListener("hashchange", () => { window.scrollTo(0, 0); show(); });
show();
