"use strict";
// The engine's page. It asks /status every second and patches what changed, so that focus, selection and scrolling stay.
// All text goes in by textContent: a name or an error can never become markup.

const POLL_MS = 1000;
const TIMEOUT_MS = 5000;
const SHOWN_ROWS = 500;
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let latest = null;

// -- small tools -----------------------------------------------------------------------------------------------------

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function svg(tag, attributes = {}, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function text(node, value) { if (node.textContent !== value) node.textContent = value; }
function attr(node, name, value) { if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value); }

// Keeps one child per item, by key: makes what is new, updates what stays, removes what is gone, in the items' order.
function keyed(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const id = String(key(item));
    let child = old.get(id);
    if (child) old.delete(id);
    else { child = make(item); child.dataset.key = id; }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, item);
  });
  old.forEach((child) => child.remove());
}

// Integers beyond 2^53 (epochs, bigint columns) keep all their digits where the browser tells us the source text.
function parse(body) {
  return JSON.parse(body, (key, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && context && /^-?\d+$/.test(context.source ?? "")
      ? BigInt(context.source) : value);
}

// -- how numbers read ------------------------------------------------------------------------------------------------

const missing = (value) => value === null || value === undefined;
const integer = (value) => missing(value) ? "–" : typeof value === "bigint" ? String(value) : value.toLocaleString("en-US");
function short(value, units, base) {
  if (missing(value)) return "–";
  let rest = Number(value), unit = 0;
  while (Math.abs(rest) >= base && unit < units.length - 1) { rest /= base; unit += 1; }
  const digits = unit === 0 || Math.abs(rest) >= 100 ? 0 : Math.abs(rest) >= 10 ? 1 : 2;
  return `${rest.toFixed(digits)}${units[unit]}`;
}
const count = (value) => short(value, ["", " k", " M", " G"], 1000);
const bytes = (value) => short(value, [" B", " KiB", " MiB", " GiB", " TiB"], 1024);
const rate = (value) => missing(value) ? "–" : value === 0 ? "idle" : `${count(value)}/s`;
function duration(seconds) {
  if (missing(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.round(seconds / 86400)} days`;
}
const milliseconds = (ms) => missing(ms) ? "–" : ms < 10 ? `${ms.toFixed(1)} ms` : ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
const since = (at) => Math.max(0, (Date.now() - Date.parse(at)) / 1000);
const clock = (at) => new Date(at).toLocaleTimeString();
const sum = (items, field) => items.reduce((total, item) => total + Number(item[field] ?? 0), 0);

// -- asking the engine -----------------------------------------------------------------------------------------------

// The token comes behind the # of the address, which no server ever sees; it stays in this tab, and out of sight.
const KEPT = "headwater-token";
let token = null;
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  try { token = given ?? token ?? sessionStorage.getItem(KEPT); if (given) sessionStorage.setItem(KEPT, given); }
  catch { token = given ?? token; /* without storage it lasts until the page is loaded again */ }
  if (given) history.replaceState(null, "", location.pathname);
}
async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const answer = await fetch(path, { credentials: "omit", cache: "no-store", ...options, headers });
  const body = parse(await answer.text());
  if (!answer.ok) throw Object.assign(new Error(body.error?.message ?? answer.statusText), { status: answer.status, error: body.error });
  return body;
}
const sql = (statement) => ask("/sql", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ statement }) });

async function poll() {
  try {
    if (!token) throw Object.assign(new Error("no token"), { status: 401 });
    if (!document.hidden) {
      latest = await ask("/status", { signal: AbortSignal.timeout(TIMEOUT_MS) });
      show(latest);
      banner(latest.health?.healthy === false ? `The engine is not healthy: ${latest.health.reason}.` : "", false);
    }
  } catch (problem) {
    banner(problem.status === 401
      ? `${token ? "The token is not valid any more" : "This page needs the engine's token"}. Open the address that headwater run printed, or add #token= and what headwater token prints.`
      : "No answer from the engine. Trying again every second; what you see is the last known state.");
    state("lost", problem.status === 401 ? "no token" : "no answer");
    if ($("f-jobs-note").textContent === WELL) text($("f-jobs-note"), "when last heard of");
  } finally {
    setTimeout(poll, POLL_MS);
  }
}

function banner(message, stale = Boolean(message)) {
  text($("banner"), message);
  $("banner").hidden = !message;
  $("main").classList.toggle("stale", stale);
}
function state(kind, label) { attr($("state"), "data-state", kind); text($("state"), label); }

// -- the whole page --------------------------------------------------------------------------------------------------

function show(status) {
  const { engine, jobs, sources, log_stores: stores, barriers } = status;
  const errors = openErrors(status), ill = status.health?.healthy === false;
  text($("engine"), `${engine.version} · ${engine.master} · pid ${engine.pid} · generation ${engine.generation} · up ${duration(since(engine.started_at))} · ${engine.data_dir}`);
  const broken = jobs.filter((job) => job.state === "failed").length;
  if (ill) state("errors", "not healthy");
  else if (engine.paused) state("paused", "paused");
  else if (broken) state("errors", `${broken} failed`);
  else state("running", "running");
  text($("pause"), engine.paused ? "Resume" : "Pause");
  $("pause").disabled = pausing;
  document.title = `${engine.paused ? "⏸ " : broken || ill ? "⚠ " : ""}Headwater`;
  showFigures(status);
  showErrors(errors);
  showGraph(jobs);
  showJobs(jobs);
  showPlot(barriers);
  showTable("sources", sources, (row) => row.name, [
    (cell, row) => text(cell, `${row.name} (${row.connector})`),
    (cell, row) => text(cell, `${bytes(row.lag_bytes)}${missing(row.lag_s) ? "" : ` · ${duration(row.lag_s)}`}`),
    (cell, row) => text(cell, bytes(row.retained_bytes)),
    (cell, row) => text(cell, row.position ?? "–"),
    (cell, row) => text(cell, row.acknowledged ?? "–"),
  ], "no sources");
  showTable("stores", stores, (row) => row.sink, [
    (cell, row) => text(cell, row.sink),
    (cell, row) => text(cell, integer(row.backlog_rows)),
    (cell, row) => text(cell, bytes(row.backlog_bytes)),
    (cell, row) => text(cell, integer(row.backlog_epochs)),
    (cell, row) => text(cell, missing(row.delivered_to) ? "–" : String(row.delivered_to)),
    (cell, row) => text(cell, missing(row.truncated_to) ? "–" : String(row.truncated_to)),
  ], "no sinks");
}

function figure(id, value, note) {
  text($(`f-${id}`), value);
  $(`f-${id}`).classList.toggle("long", value.length > 11);
  text($(`f-${id}-note`), note);
}

const WELL = "all is well";
// What has ended is history, and hw_catalog.hw_errors has it; so is what went wrong with a job that is gone.
function openErrors({ errors, jobs }) {
  const known = new Set(jobs.map((job) => job.id));
  return errors.filter((error) => missing(error.ended_at) && (missing(error.job_id) || known.has(error.job_id)));
}

function showFigures(status) {
  const { committed_epoch: epoch, barriers, jobs, sources, log_stores: stores } = status;
  const last = barriers.at(-1);
  figure("epoch", missing(epoch) ? "none yet" : String(epoch), last ? `${duration(since(last.at))} ago` : "");
  const ordered = barriers.map((barrier) => barrier.ms).sort((a, b) => a - b);
  const at = (share) => ordered[Math.min(ordered.length - 1, Math.floor(ordered.length * share))];
  figure("barrier", milliseconds(at(0.5)), ordered.length ? `p99 ${milliseconds(at(0.99))}` : "");
  const tables = jobs.filter((job) => job.kind === "table");
  figure("rate", rate(sum(tables, "rows_per_s")), `into ${tables.length} table${tables.length === 1 ? "" : "s"}`);
  figure("lag", sources.length ? bytes(sum(sources, "lag_bytes")) : "–", sources.length ? `retained ${bytes(sum(sources, "retained_bytes"))}` : "no sources");
  figure("backlog", stores.length ? `${count(sum(stores, "backlog_rows"))} rows` : "–", stores.length ? bytes(sum(stores, "backlog_bytes")) : "no sinks");
  const number = (wanted) => jobs.filter((job) => job.state === wanted).length;
  const others = ["creating", "paused", "failed"].map((kind) => [kind, number(kind)]).filter(([, n]) => n).map(([kind, n]) => `${n} ${kind}`);
  const open = openErrors(status).length, well = !open && status.health?.healthy !== false;
  const word = well ? WELL : open ? `${open} error${open === 1 ? "" : "s"}` : "not healthy";
  figure("jobs", `${number("live")} live`, others.join(", ") || (jobs.length ? word : "none yet"));
}

function showErrors(errors) {
  $("errors-card").hidden = !errors.length;
  text($("errors-note"), `${errors.length} open`);
  const newest = [...errors].sort((a, b) => Date.parse(b.at) - Date.parse(a.at));
  keyed($("errors"), newest, (error) => `${error.at} ${error.job_id} ${error.code}`, () => {
    const hint = el("p", { class: "hint" });
    return el("li", {}, el("span", { class: "where" }), el("span", { class: "code" }), el("span", { class: "message" }), hint);
  }, (item, error) => {
    attr(item, "data-retrying", Boolean(error.retrying));
    const [where, code, message, hint] = item.children;
    text(where, [error.name, clock(error.at), error.retrying ? "retrying" : "stopped"].filter(Boolean).join(" · "));
    text(code, error.code);
    text(message, error.message);
    text(hint, error.hint ?? "");
    hint.hidden = !error.hint;
  });
}

function showTable(id, rows, key, columns, nothing) {
  const table = $(id), labels = [...table.tHead.rows[0].cells];
  keyed(table.tBodies[0], rows.length ? rows : [null], (row) => row ? key(row) : " none", (row) => {
    const line = el("tr");
    if (!row) line.append(el("td", { colspan: labels.length, class: "empty" }, nothing));
    else columns.forEach((_, index) => line.append(el("td", { "data-label": labels[index].textContent, class: labels[index].className })));
    return line;
  }, (line, row) => {
    if (row) columns.forEach((fill, index) => {
      const cell = line.cells[index];
      fill(cell, row);
      if (index) cell.classList.toggle("blank", cell.textContent === "–" || cell.textContent === "" || cell.firstChild.hidden === true);
    });
  });
}

// -- jobs ------------------------------------------------------------------------------------------------------------

function showJobs(jobs) {
  showTable("jobs", jobs, (job) => job.id, [nameCell, stateCell, (cell, job) => text(cell, job.phase ?? "–"), progressCell,
    (cell, job) => text(cell, copied(job)),
    (cell, job) => text(cell, rate(job.rows_per_s)),
    (cell, job) => text(cell, done(job) ? "–" : duration(job.eta_s)),
    (cell, job) => { text(cell, job.waiting_for ?? ""); cell.className = job.waiting_for ? "wrap" : ""; },
  ], "no jobs");
}
// What was copied or delivered so far, not what there is: of a live job that had nothing to copy, 0 would mislead.
const copied = (job) => job.state === "live" && !job.rows ? "–" : integer(job.rows);
const done = (job) => missing(job.percent) || job.percent >= 100 || job.state === "live";

function nameCell(cell, job) {
  if (!cell.firstChild) {
    const button = el("button", { type: "button", class: "name-cell" });
    button.addEventListener("click", () => showDetail(cell.dataset.job));
    cell.append(button, el("span", { class: "kind-tag" }));
  }
  cell.dataset.job = job.name;
  attr(cell, "data-kind", job.kind);
  text(cell.children[0], job.name);
  text(cell.children[1], job.kind);
}
function stateCell(cell, job) {
  if (!cell.firstChild) cell.append(el("span", { class: "pill small" }));
  attr(cell.firstChild, "data-state", job.state);
  text(cell.firstChild, job.state);
}
function progressCell(cell, job) {
  if (!cell.firstChild) cell.append(el("div", { class: "progress" }, el("progress", { max: 100 }), el("span")));
  const box = cell.firstChild;
  box.hidden = done(job);
  if (done(job)) return;
  box.firstChild.value = job.percent;
  attr(box.firstChild, "aria-label", `progress of ${job.name}`);
  text(box.lastChild, `${Number(job.percent).toFixed(2)}% (${integer(job.done)}/${integer(job.total)})`);
}

function showDetail(name) {
  const job = latest?.jobs.find((candidate) => candidate.name === name);
  if (!job) return;
  text($("d-name"), job.name);
  const facts = { Kind: job.kind, State: job.state, Lane: job.lane, Phase: job.phase, "Reads from": (job.depends_on ?? []).join(", "),
    Rows: copied(job), Size: bytes(job.bytes), Rate: rate(job.rows_per_s), "Waiting for": job.waiting_for };
  $("d-list").replaceChildren(...Object.entries(facts).filter(([, value]) => value && value !== "–")
    .flatMap(([label, value]) => [el("dt", {}, label), el("dd", {}, String(value))]));
  text($("d-definition"), job.definition ?? "");
  $("d-definition").hidden = !job.definition;
  $("detail").showModal();
}

// -- the graph -------------------------------------------------------------------------------------------------------

const NODE = { width: 196, height: 66 };
let drawn = { signature: "", nodes: new Map(), flows: [] };

function showGraph(jobs) {
  const width = $("graph").clientWidth;
  const signature = JSON.stringify([width, jobs.map((job) => [job.id, job.name, job.kind, job.depends_on])]);
  $("graph-empty").hidden = jobs.length > 0;
  if (signature !== drawn.signature) drawGraph(jobs, width, signature);
  for (const job of jobs) updateNode(drawn.nodes.get(job.name), job);
  const byName = new Map(jobs.map((job) => [job.name, job]));
  const moves = (name) => Number(byName.get(name)?.rows_per_s ?? 0) > 0;
  for (const { path, from, to } of drawn.flows) path.classList.toggle("on", moves(from) && moves(to));
}

// Longest path from a source gives the layer; sinks stand in the last one.
function layersOf(jobs) {
  const byName = new Map(jobs.map((job) => [job.name, job])), level = new Map();
  const first = jobs.some((job) => job.kind === "source") ? 1 : 0;
  const visit = (job, path) => {
    if (level.has(job.name)) return level.get(job.name);
    if (path.has(job.name)) return 0;
    const above = (job.depends_on ?? []).map((name) => byName.get(name)).filter(Boolean);
    const own = above.length ? 1 + Math.max(...above.map((one) => visit(one, new Set([...path, job.name])))) : job.kind === "source" ? 0 : first;
    level.set(job.name, own);
    return own;
  };
  jobs.forEach((job) => visit(job, new Set()));
  const deepest = Math.max(0, ...jobs.filter((job) => job.kind !== "sink").map((job) => level.get(job.name)));
  const layers = [];
  for (const job of jobs) {
    const own = job.kind === "sink" ? Math.max(deepest + 1, level.get(job.name)) : level.get(job.name);
    (layers[own] ??= []).push(job);
  }
  return order(layers.filter(Boolean));
}
// Each node goes near the middle of what it reads from, so that few edges cross.
function order(layers) {
  const place = new Map();
  const middle = (job) => {
    const found = (job.depends_on ?? []).filter((name) => place.has(name)).map((name) => place.get(name));
    return found.length ? found.reduce((a, b) => a + b, 0) / found.length : 0.5;
  };
  for (const layer of layers) {
    layer.sort((a, b) => middle(a) - middle(b));
    layer.forEach((job, index) => place.set(job.name, (index + 0.5) / layer.length));
  }
  return layers;
}

function drawGraph(jobs, width, signature) {
  const focused = document.activeElement?.closest?.(".node")?.dataset.name;
  const layers = layersOf(jobs), tall = width < 620;
  const spots = tall ? placeDown(layers, width) : placeAcross(layers, width);
  const picture = svg("svg", { width: spots.width, height: spots.height, viewBox: `0 0 ${spots.width} ${spots.height}`, role: "group", "aria-label": "Graph of sources, tables, views and sinks" });
  drawn = { signature, nodes: new Map(), flows: [] };
  for (const job of jobs) for (const from of job.depends_on ?? []) {
    if (!spots.at.has(from)) continue;
    const line = curve(spots.at.get(from), spots.at.get(job.name), tall), path = svg("path", { class: "flow", d: line });
    picture.append(svg("path", { class: "edge", d: line }), path);
    drawn.flows.push({ path, from, to: job.name });
  }
  for (const job of layers.flat()) {
    const node = makeNode(job, spots.at.get(job.name));
    picture.append(node.group);
    drawn.nodes.set(job.name, node);
  }
  $("graph").replaceChildren(picture);
  drawn.nodes.forEach((node) => shorten(node.name, node.width - 22));
  if (focused) drawn.nodes.get(focused)?.group.focus();
}
function placeAcross(layers, width) {
  const rows = Math.max(1, ...layers.map((layer) => layer.length)), gapY = 22;
  const room = layers.length > 1 ? (width - 4 - layers.length * NODE.width) / (layers.length - 1) : 0;
  const gapX = Math.max(44, Math.min(190, room)), height = rows * (NODE.height + gapY) - gapY + 4;
  const used = layers.length * NODE.width + (layers.length - 1) * gapX, left = 2 + Math.max(0, (width - 4 - used) / 2);
  const at = new Map();
  layers.forEach((layer, column) => {
    const top = 2 + (height - 4 - (layer.length * (NODE.height + gapY) - gapY)) / 2;
    layer.forEach((job, index) => at.set(job.name, { x: left + column * (NODE.width + gapX), y: top + index * (NODE.height + gapY), w: NODE.width }));
  });
  return { at, width: Math.max(width, used + 4), height };
}
// On a phone the graph runs downwards, two nodes side by side; a fuller layer takes several lines.
function placeDown(layers, width) {
  const at = new Map(), gap = 12, narrow = Math.max(140, (width - 4 - gap) / 2);
  let y = 2;
  for (const layer of layers) {
    layer.forEach((job, index) => {
      const alone = index === layer.length - 1 && index % 2 === 0;
      const w = Math.min(alone ? NODE.width : narrow, NODE.width);
      const x = alone ? (width - w) / 2 : index % 2 ? width / 2 + gap / 2 : width / 2 - gap / 2 - w;
      at.set(job.name, { x, y: y + Math.floor(index / 2) * (NODE.height + gap), w });
    });
    y += Math.ceil(layer.length / 2) * (NODE.height + gap) + 22;
  }
  return { at, width, height: Math.max(2, y - 22 - gap + 2) };
}
function curve(from, to, tall) {
  if (tall) {
    const [x1, y1, x2, y2] = [from.x + from.w / 2, from.y + NODE.height, to.x + to.w / 2, to.y], bend = Math.max(14, (y2 - y1) / 2);
    return `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`;
  }
  const [x1, y1, x2, y2] = [from.x + from.w, from.y + NODE.height / 2, to.x, to.y + NODE.height / 2], bend = Math.max(20, (x2 - x1) / 2);
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}
function makeNode(job, spot) {
  const group = svg("g", { class: "node", tabindex: 0, role: "button", "data-kind": job.kind, "data-name": job.name, transform: `translate(${spot.x} ${spot.y})` });
  const node = { group, name: svg("text", { class: "name", x: 16, y: 26 }, job.name), width: spot.w - 28, title: svg("title"), kind: svg("text", { class: "kind", x: 16, y: 45 }), rate: svg("text", { class: "rate", x: spot.w - 12, y: 45 }),
    track: svg("rect", { class: "track", x: 16, y: 54, width: spot.w - 28, height: 4, rx: 2 }), fill: svg("rect", { class: "fill", x: 16, y: 54, width: 0, height: 4, rx: 2 }) };
  group.append(node.title, svg("rect", { class: "box", width: spot.w, height: NODE.height, rx: 10 }), svg("rect", { class: "stripe", x: 0, y: 12, width: 4, height: NODE.height - 24, rx: 2 }),
    svg("circle", { class: "dot", cx: spot.w - 16, cy: 21, r: 4.5 }), node.name, node.kind, node.rate, node.track, node.fill);
  group.addEventListener("click", () => showDetail(job.name));
  group.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); showDetail(job.name); }
  });
  return node;
}
// Letters are measured, not counted: fonts differ between machines.
function shorten(label, room) {
  const whole = label.textContent;
  for (let length = whole.length - 1; length > 1 && label.getComputedTextLength() > room; length -= 1) label.textContent = `${whole.slice(0, length)}…`;
}
function updateNode(node, job) {
  if (!node) return;
  attr(node.group, "data-state", job.state);
  const copying = !done(job), summary = job.state === "live" ? job.kind : copying ? `${Number(job.percent).toFixed(1)}%` : job.state;
  text(node.kind, summary);
  text(node.rate, job.kind === "source" && !job.rows_per_s ? "" : rate(job.rows_per_s));
  node.rate.classList.toggle("on", Number(job.rows_per_s ?? 0) > 0);
  node.track.classList.toggle("on", copying);
  attr(node.track, "visibility", copying ? "visible" : "hidden");
  attr(node.fill, "width", copying ? (node.width * Math.min(100, job.percent)) / 100 : 0);
  const words = `${job.name}, ${job.kind}, ${job.state}${copying ? `, ${Number(job.percent).toFixed(1)} percent` : ""}, ${rate(job.rows_per_s)}${job.waiting_for ? `, waiting for ${job.waiting_for}` : ""}`;
  text(node.title, words);
  attr(node.group, "aria-label", words);
}

// -- the plot of barrier latencies -----------------------------------------------------------------------------------

const SLOTS = 120;
let plotted = "";
function showPlot(barriers) {
  const signature = `${barriers.at(-1)?.epoch} ${barriers.length} ${$("plot").clientWidth}`;
  if (signature === plotted) return;
  plotted = signature;
  const width = Math.max(240, $("plot").clientWidth), height = 150, left = 46, top = 8, bottom = 20;
  const last = barriers.slice(-SLOTS), highest = Math.max(10, ...last.map((barrier) => barrier.ms)), ceiling = nice(highest);
  const y = (ms) => top + (height - top - bottom) * (1 - ms / ceiling), step = (width - left) / SLOTS;
  const newest = last.at(-1);
  text($("plot-note"), newest ? `latest ${milliseconds(newest.ms)} · highest ${milliseconds(Math.max(...last.map((b) => b.ms)))}` : "no barrier yet");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `Latency of the last ${last.length} barriers, ${$("plot-note").textContent}` });
  for (const share of [0, 0.5, 1]) {
    const line = y(ceiling * share);
    picture.append(svg("line", { class: "grid", x1: left, x2: width, y1: line, y2: line }), svg("text", { x: left - 6, y: line + 4, "text-anchor": "end" }, axis(ceiling * share)));
  }
  last.forEach((barrier, index) => {
    const x = left + (SLOTS - last.length + index) * step, high = Math.max(1.5, height - bottom - y(barrier.ms)), group = svg("g");
    group.append(svg("title", {}, `epoch ${barrier.epoch}: ${milliseconds(barrier.ms)} at ${clock(barrier.at)}`),
      svg("rect", { class: barrier.ms > 1000 ? "bar-slow" : "bar-ok", x, y: height - bottom - high, width: Math.max(1, step - 1), height: high, rx: Math.min(1.5, step / 3) }));
    picture.append(group);
  });
  if (last.length) {
    picture.append(svg("text", { x: left, y: height - 4 }, last.length < SLOTS ? "" : `since ${clock(last[0].at)}`), svg("text", { x: width, y: height - 4, "text-anchor": "end" }, `now`));
  }
  $("plot").replaceChildren(picture);
}
// Short enough for the margin, whatever the size: 5 ms, 250 ms, 2.5 s, 100 s.
const axis = (ms) => ms < 1000 ? `${Number(ms.toPrecision(3))} ms` : `${Number((ms / 1000).toPrecision(3))} s`;
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((ceiling) => ceiling >= value);
}

// -- pause, theme, query ---------------------------------------------------------------------------------------------

let pausing = false;
async function togglePause() {
  if (!latest) return;
  pausing = true;
  $("pause").disabled = true;
  try { await sql(latest.engine.paused ? "RESUME" : "PAUSE"); latest = await ask("/status"); }
  catch (problem) { showProblem(problem); }
  pausing = false;
  show(latest);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("headwater-theme", theme); } catch { /* private windows have no storage */ }
}
function initialTheme() {
  try { const kept = localStorage.getItem("headwater-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* as above */ }
}
function toggleTheme() {
  const dark = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  setTheme(dark === "dark" ? "light" : "dark");
}

let running = false;
async function runQuery(event) {
  event?.preventDefault();
  const statement = $("query").value.trim();
  if (!statement || running) return;
  running = true;
  $("run").disabled = true;
  text($("answer-note"), "running…");
  $("answer-error").hidden = true;
  const begin = performance.now();
  try { showRows(await sql(statement), performance.now() - begin); }
  catch (problem) { showProblem(problem); }
  running = false;
  $("run").disabled = false;
}
function showRows({ columns, rows, epoch }, ms) {
  const shown = rows.slice(0, SHOWN_ROWS), parts = columns.length ? [`${integer(rows.length)} row${rows.length === 1 ? "" : "s"}`] : ["done"];
  if (rows.length > SHOWN_ROWS) parts.push(`first ${SHOWN_ROWS} shown`);
  parts.push(milliseconds(ms));
  if (!missing(epoch)) parts.push(`epoch ${epoch}`);
  text($("answer-note"), parts.join(" · "));
  $("rows").tHead.replaceChildren(el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name))));
  $("rows").tBodies[0].replaceChildren(...shown.map((row) => el("tr", {}, ...columns.map((name) => valueCell(row[name])))));
  $("answer-scroll").hidden = !columns.length;
}
function valueCell(value) {
  if (missing(value)) return el("td", { class: "null" }, "NULL");
  const words = typeof value === "object" ? JSON.stringify(value, (key, inner) => typeof inner === "bigint" ? String(inner) : inner) : String(value);
  return el("td", { class: typeof value === "number" || typeof value === "bigint" ? "n" : "", title: words }, words);
}
function showProblem(problem) {
  const { code = "NO_ANSWER", message = problem.message, detail = "", hint = "" } = problem.error ?? {};
  text($("answer-note"), "");
  $("answer-scroll").hidden = true;
  const lines = [el("span", { class: "code" }, code), el("span", {}, message)];
  if (detail) lines.push(el("p", { class: "muted" }, detail));
  if (hint) lines.push(el("p", { class: "hint" }, hint));
  $("answer-error").replaceChildren(...lines);
  $("answer-error").hidden = false;
}

initialTheme();
takeToken();
addEventListener("hashchange", takeToken);
$("pause").addEventListener("click", togglePause);
$("theme").addEventListener("click", toggleTheme);
$("form").addEventListener("submit", runQuery);
$("query").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) runQuery(event); });
document.querySelectorAll(".chip").forEach((chip) => chip.addEventListener("click", () => { $("query").value = chip.dataset.sql; runQuery(); }));
$("detail").addEventListener("click", (event) => { if (event.target === $("detail")) $("detail").close(); });
addEventListener("resize", () => { if (latest) { showGraph(latest.jobs); showPlot(latest.barriers); } });
poll();
