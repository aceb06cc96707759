// The document: what the model knows, drawn. Texts that come from outside are only ever textContent.

import { Lanes, Palette, Waterfall } from "/ui/lanes.js";
import { Model, Server } from "/ui/model.js";

const THEME = "pipeswitch-theme";
const TOAST_MS = 7000;
const SURE_MS = 3000;
const FOLLOW_MS = 2500; // one request stays shown for so long, unless it was chosen
const MAX_LOG = 200000;
const SHOWN_REQUESTS = 12;
const SHOWN_OWNERS = 8;
const NAMED = 0.06; // of the arena: what is narrower has no room for a name and its groups
const FEW = 6; // models that need no search
const OLD_MS = 60000; // the newest request, before its age is told
const NOISY = /^job\.(progress|committed)$/;

const $ = (id) => document.getElementById(id);
const server = new Server();
const model = new Model(server, changed);
const palette = new Palette();
const lanes = new Lanes($("lanes"), model.timeline, palette);
const waterfall = new Waterfall($("waterfall"), palette);
const modelWaterfall = new Waterfall($("model-waterfall"), palette);
let detail = null; // the model that is looked at: its name and its versions' rows
let shownModels = []; // as the list has them
let chosen = null; // the flow of a request that was clicked
let shown = { request: null, at: 0 };
const dirty = new Set();

// An element: its class, its text, and what is in it.
function make(tag, name = "", text = "", ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== "") element.textContent = text;
  element.append(...children);
  return element;
}

function fill(element, children) { element.replaceChildren(...children); }

function size(bytes) {
  const value = Number(bytes);
  if (value >= 1 << 30) return `${(value / (1 << 30)).toFixed(1)} GiB`;
  return value >= 1 << 20 ? `${Math.round(value / (1 << 20))} MiB` : `${Math.round(value / 1024)} KiB`;
}

const ms = (value) => (value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`);
const rate = (value) => value.toFixed(value < 10 ? 1 : 0);
const count = (value) => Number(value).toLocaleString("en").replaceAll(",", "\u202f");

const CALLERS = { "(owner)": "the owner", "*": "callers without a key or token" };
const counted = (value, noun, plural = "s") => `${count(value)} ${noun}${value === 1 ? "" : plural}`;

function toast(text, hint = "", isGood = false) {
  const note = make("p", isGood ? "good" : "", hint ? `${text} — ${hint}` : text);
  $("toasts").append(note);
  setTimeout(() => note.remove(), TOAST_MS);
}

async function act(button, what) {
  if (button) button.disabled = true;
  try { return await what(); } catch (error) { toast(error.message, error.hint); } finally { if (button) button.disabled = false; }
  return null;
}

function ago(sinceMs) {
  const seconds = (model.timeline.now - sinceMs) / 1000;
  return seconds < 120 ? `${Math.round(seconds)} s ago` : seconds < 7200 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

// A panel without anything to show is its heading alone.
function fold(id, isEmpty) { $(id).closest("section").classList.toggle("folded", isEmpty); }

// What the server's own lists call a model's version.
const inPs = (row) => (row.version > 1 ? `${row.name}@${row.version}` : row.name);
const term = (name, text) => make("div", "", "", make("dt", "", name), make("dd", "", text));

// ---- what changed -------------------------------------------------------------------------------

function changed(what) {
  dirty.add(what);
  if (what === "state") showState();
}

function showState() {
  document.body.dataset.state = model.state;
  const words = { live: "live", away: "the server does not answer; trying again", login: "a token is needed", starting: "connecting" };
  $("status-text").textContent = words[model.state];
  if (model.state === "login") $("wrong").textContent = model.refusal ? `${model.refusal.message}` : "";
}

function showFacts() {
  if (!model.about || !model.stats) return;
  const told = [`${model.about.device.replaceAll(",", ", ")} ${model.stats.devices ? "devices" : "device"}`, `${size(model.stats.arena_capacity_bytes)} arena`,
    `${counted(model.stats.inference.ok, "request")} answered`, counted(model.stats.switches, "switch", "es"),
    counted(model.stats.preemptions, "preemption")];
  if (!model.about.ready) told.unshift(model.about.why);
  $("facts").textContent = told.join("  ·  ");
  $("lanes").style.setProperty("--devices", model.timeline.devices.length);
}

// Lanes of what sequences do, once there was one.
function showSequences() {
  const { sequences, sequence_bytes: live, spare_bytes: spare, tokens } = model.sequences(), steps = (height) =>
    model.looks.slice(1).map((look, index) => ({ begin: model.looks[index].at, end: look.at, height: height(look, index) }));
  if (!lanes.levels.length && !sequences && !tokens && !spare) return;
  const perS = rate(model.tokensPerS());
  lanes.levels = [
    { name: "Tokens", colour: "infer", told: `${perS}/s`, steps: steps((_, index) => model.tokensPerS(null, index, index + 1)) },
    { name: "Caches", colour: "quiet", told: size(live), steps: steps((look) => model.sequences(null, look).sequence_bytes) },
  ];
  $("lanes").style.setProperty("--levels", lanes.levels.length);
  $("sequences-text").textContent = `${perS} tokens/s; ${sequences} ${sequences === 1 ? "sequence holds" : "sequences hold"} ${size(live)} of the request pool` +
    (spare ? `, the prefix cache ${size(spare)}` : "");
}

function showShares() {
  if (model.timeline.offset === null) return;
  const { shares } = lanes.summary(), words = [];
  for (const name of ["train", "switch", "infer", "idle"]) {
    $("share").querySelector(`.${name}`).style.flexBasis = `${shares[name] * 100}%`;
    words.push(`${name === "switch" ? "waiting for a model" : name} ${Math.round(shares[name] * 100)} %`);
  }
  const text = `Last 10 s: ${words.join(", ")}`;
  $("share-text").textContent = text;
  $("share").setAttribute("aria-label", text);
  const jobs = model.jobs.filter((one) => ["running", "suspended", "stopping", "swapping_out", "swapped", "swapping_in"].includes(one.state));
  const since = model.timeline.now - 60000;
  const times = model.timeline.answered().filter((one) => one.preempted && one.end > since).length;
  const line = [];
  if (jobs.length) {
    const again = jobs.reduce((all, one) => all + one.steps_recomputed, 0);
    line.push("Training ", make("b", "", jobs.map((one) => one.name).join(", ")));
    if (times) line.push(`, suspended ${times} ${times === 1 ? "time" : "times"} in the last minute`);
    line.push(again ? `; ${again} steps were computed again` : "; no step was lost");
  } else line.push(model.jobs.length ? "No job trains now" : "No training job");
  fill($("headline"), line);
}

function showMemory() {
  if (!model.stats) return;
  const devices = model.stats.devices ?? [model.stats], owners = [];
  fill($("arenas"), devices.map((device) => arena(device, devices.length > 1 ? device.device : "", owners)));
  fold("arenas", !owners.length);
  const more = owners.length - SHOWN_OWNERS;
  fill($("owners"), [...owners.sort((a, b) => b.bytes - a.bytes).slice(0, SHOWN_OWNERS).map((one) => one.line), ...(more > 0 ? [make("li", "", `and ${more} more`)] : []),
    make("li", "", `free ${size(model.stats.arena_free_bytes)}`)]);
  const used = model.stats.arena_capacity_bytes - model.stats.arena_free_bytes, away = model.stats.store_offloaded_bytes, shared = model.stats.store_shared_bytes;
  $("memory-line").textContent = `${size(used)} of ${size(model.stats.arena_capacity_bytes)} on the ` +
    `${devices.length > 1 ? "devices" : "device"}, ` +
    `${size(model.stats.store_capacity_bytes - model.stats.store_free_bytes)} in the host store${away ? `, ${size(away)} of it offloaded` : ""}${shared ? `, ${size(shared)} shared by variants` : ""}`;
}

// What a job's steps hold beside its slice, what of them is sent to the host; what of a model comes with each pass.
function beside(row) {
  const told = { activations: row.activation_bytes, offloaded: row.offloaded_bytes, "streamed each time": row.streamed_bytes };
  return Object.entries(told).filter(([, bytes]) => bytes).map(([what, bytes]) => ` + ${size(bytes)} ${what}`).join("");
}

// What lies where on a device; ``owners`` gets its lines of the list below.
function arena(device, on, owners) {
  const held = model.ps.filter((row) => row.regions?.length && (row.on ?? "") === on);
  const begin = Math.max(0, model.about.arena_bytes - device.arena_capacity_bytes); // arrival words
  const whole = Math.max(1, device.arena_capacity_bytes), drawn = make("div", "arena");
  const percent = (bytes) => `${(100 * bytes) / whole}%`;
  for (const row of held) {
    const registered = model.models.find((one) => inPs(one) === row.name); // one size everywhere: regions are rounded
    const bytes = (row.streamed_bytes === undefined && registered?.bytes) || row.regions.reduce((all, region) => all + region[1], 0);
    row.regions.forEach(([offset, length], index) => {
      const piece = make("div", `region ${row.kind === "job" ? "job" : row.state}`);
      piece.style.left = percent(Math.max(0, offset - begin));
      piece.style.width = percent(length);
      piece.title = `${row.name}: ${size(length)}`;
      if (index === 0 && length / whole > NAMED) piece.append(make("b", "", row.name));
      let at = 0;
      for (const group of row.regions.length === 1 && length / whole > NAMED ? row.group_bytes : []) {
        const mark = make("i");
        mark.style.left = `${(100 * at) / length}%`;
        mark.style.width = `${(100 * group) / length}%`;
        at += group;
        piece.append(mark);
      }
      drawn.append(piece);
    });
    owners.push({ bytes, line: make("li", "", "", make("b", "", row.name), ` ${size(bytes)}${beside(row)}, ${row.state}${on && ` on ${on}`}`) });
  }
  drawn.setAttribute("role", "img");
  const words = held.map((row) => `${row.name} ${row.state}`).join(", ") || "empty";
  drawn.setAttribute("aria-label", `${on || "arena"}: ${words}`);
  return drawn;
}

const STATE_COLOURS = { active: "infer", resident: "infer", transmitting: "switch", running: "train", suspended: "train", stopping: "train", swapping_out: "switch", swapped: "train", swapping_in: "switch", failed: "bad", quarantined: "bad" };
const pill = (text) => make("span", `pill ${STATE_COLOURS[text] || ""}`, text);

// Rows stay the same elements by name, so that the focus stays where it is.
function keyed(list, rows, makeRow, updateRow, empty) {
  const there = new Map([...list.children].map((row) => [row.dataset.name, row]));
  const wanted = rows.map((row) => {
    let element = there.get(row.name);
    if (!element) {
      element = makeRow(row);
      element.dataset.name = row.name;
    }
    updateRow(element, row);
    return element;
  });
  if (!rows.length) wanted.push(make("li", "empty", empty));
  if (wanted.length !== list.children.length || wanted.some((row, index) => row !== list.children[index])) fill(list, wanted);
}

function button(text, title, run) {
  const made = make("button", "", text);
  made.type = "button";
  made.title = title;
  made.setAttribute("aria-label", title);
  made.addEventListener("click", () => run(made));
  return made;
}

const ORDERS = {
  first: () => 0,
  name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }),
  requests: (a, b) => b.requests - a.requests,
  bytes: (a, b) => b.bytes - a.bytes,
  used: (a, b, ps) => (ps.get(inPs(a))?.last_used ?? Infinity) - (ps.get(inPs(b))?.last_used ?? Infinity) || 0,
  place: (a, b, ps) => PLACES.indexOf(ps.get(inPs(a))?.state) - PLACES.indexOf(ps.get(inPs(b))?.state),
};
const PLACES = ["failed", "active", "transmitting", "resident", "host"];

function showModels() {
  const rows = model.ps.filter((row) => row.kind === "model"), where = (row) => Boolean(row.regions.length);
  const ps = new Map(rows.sort((a, b) => where(a) - where(b)).map((row) => [row.name, row])); // one that is on a device
  const wanted = $("find").value.trim().toLowerCase(), order = ORDERS[$("sort").value];
  $("finder").hidden = model.models.length < FEW && !wanted;
  shownModels = model.models.filter((row) => `${row.name} ${row.source} ${row.state}`.toLowerCase().includes(wanted))
    .sort((a, b) => order(a, b, ps));
  keyed($("models"), shownModels, (row) => {
    const pin = button("Pin", `Pin ${row.name} on the device`, (one) =>
      act(one, () => server.post(`/api/models/${encodeURIComponent(row.name)}/${one.dataset.verb}`)));
    const acts = make("div", "acts", "", button("Infer", `Infer ${row.name} with ${model.texts.has(row.name) ? "a text" : "a random input"}`, (one) => infer(row.name, one)), pin);
    const name = button(row.name, `Details of ${row.name}`, () => lookAt(row.name));
    name.className = "name";
    return make("li", "", "", make("div", "who", "", make("kbd"), name, make("span", "pills")), make("p", "what"), acts, make("p", "why"));
  }, (element, row) => {
    const now = ps.get(inPs(row)), number = shownModels.indexOf(row) + 1, key = element.querySelector("kbd");
    key.textContent = number > 9 ? "" : number;
    key.style.visibility = number > 9 ? "hidden" : "";
    fill(element.querySelector(".pills"), [pill(now?.state ?? row.state), ...(row.pinned ? [pill("pinned")] : []),
      ...(row.versions.length > 1 ? [pill(`v${row.version}${row.share < 100 ? ` ${row.share} %` : ""}`)] : [])]);
    const { tokens } = model.sequences(inPs(row)), perS = model.tokensPerS(inPs(row)), did = tokens ? `${count(tokens)} tokens` : `${count(row.requests)} requests`;
    element.querySelector(".what").textContent = `${size(row.bytes)}${row.precision ? ` ${row.precision.name}` : ""} · ${did}${perS ? `, ${rate(perS)}/s` : ""}`;
    const why = row.reason || (now?.why !== "pinned" && now?.why) || "";
    const told = element.querySelector(".why");
    told.textContent = why;
    told.hidden = !why;
    told.classList.toggle("bad", Boolean(row.reason));
    const pin = element.querySelector(".acts").lastChild;
    pin.dataset.verb = row.pinned ? "unload" : "load";
    pin.textContent = row.pinned ? "Unpin" : "Pin";
    pin.title = row.pinned ? `Unpin ${row.name}` : `Pin ${row.name} on the device`;
    pin.setAttribute("aria-label", pin.title);
  }, model.models.length ? "No such model" : "No models yet: pipeswitch register resnet18 torchvision:resnet18 --weights random:0");
  const told = wanted ? [`${shownModels.length} of ${model.models.length}`] : model.models.length ? [`${model.models.length} registered`] : [];
  if (model.stats?.queued) told.push(`${model.stats.queued} waiting for the device`);
  const tenants = Object.entries(model.stats?.tenant_s ?? {}).map(([name, seconds]) => `${CALLERS[name] ?? name} used the device for ${seconds.toFixed(1)} s`);
  $("queue-line").textContent = [...told, ...(tenants.length > 1 ? tenants : [])].join(", ");
}

// ---- one model ----------------------------------------------------------------------------------

async function lookAt(name) {
  const path = (version) => `/api/models/${encodeURIComponent(name)}?version=${version}`;
  const row = await act(null, () => server.get(path(0)));
  if (!row) return;
  const rows = await act(null, () => Promise.all(row.versions.map((version) => server.get(path(version)))));
  detail = { name, row, rows: rows ?? [row] };
  $("model").showModal();
  showDetail();
}

function showDetail() {
  const { name, row, rows } = detail, shapes = (values) => Object.entries(values).map(([key, [shape, dtype]]) => `${key} ${shape.join("×")} ${dtype}`).join(", ");
  $("model-title").textContent = name;
  const facts = { state: row.state, size: size(row.bytes), requests: count(row.requests), source: row.source, inputs: shapes(row.inputs), outputs: shapes(row.outputs),
    sequences: model.sequences(inPs(row)).sequences || "", priority: row.priority, mode: row.mode_reason ? `${row.mode} (${row.mode_reason})` : row.mode, owner: row.tenant, why: row.reason };
  fill($("model-facts"), Object.entries(facts).filter(([, text]) => text).map(([key, text]) => term(key, text)));
  const line = (tag, texts) => make("tr", "", "", ...texts.map((text) => make(tag, "", text)));
  fill($("versions"), rows.length < 2 ? [] : [line("th", ["version", "share", "state", "size", "requests", "source"]),
    ...rows.map((one) => line("td", [`${one.version}${one.current ? " current" : ""}`, `${one.share} %`, one.state, size(one.bytes), count(one.requests), one.source]))]);
  const on = model.ps.find((one) => one.name === inPs(row) && one.group_bytes.length), groups = on?.group_bytes ?? [];
  fill($("plan"), groups.map((bytes) => {
    const piece = make("i");
    piece.style.flexGrow = String(bytes);
    piece.title = size(bytes);
    return piece;
  }));
  const predicted = Object.entries(row.predicted_ms ?? {}).map(([batch, value]) => `batch ${batch}: ${ms(value)} predicted`);
  $("plan-line").textContent = [`${row.groups} groups`, `planned by ${row.grouping}${row.grouping_why ? `: ${row.grouping_why}` : ""}`, ...predicted].join(", ");
  showDetailSwitch();
}

function showDetailSwitch() {
  const found = model.timeline.lastSwitch(detail.rows.map(inPs));
  $("model-waterfall").hidden = !found;
  $("model-request-line").textContent = found ? `${found.copies.length} layer groups streamed in, ${ago(found.end)}${found.preempted ? "; training was suspended" : ""}` : "None in the timeline";
  modelWaterfall.draw(found);
  showTiming($("model-timing"), found);
}

const BILL = { queue: "until the scheduler chose it", switch: "until its first layers compute: training stops, and a model that is not on the device begins to stream in",
  copy: "from the first to the last copied layer group; other parts overlap it", stall: "layers waited for their copy", compute: "layers computed", total: "until the answer" };

function showTiming(list, one) {
  fill(list, one ? Object.entries(BILL).map(([name, meaning]) => {
    const part = term(name, ms(one.timing[name]));
    part.title = meaning;
    return part;
  }) : []);
}

async function infer(name, one = null) {
  const row = model.models.find((found) => found.name === name);
  if (!row) return;
  if (model.texts.has(name)) {
    const text = prompt(`Text for ${name}`, "Once upon a time");
    const told = text && (await act(one, () => server.complete(name, text)));
    if (told) toast(`${name}: ${told}`, "", true);
    return;
  }
  const timing = await act(one, () => server.infer(row));
  if (timing) {
    toast(`${name}: ${ms(timing.total_ms)}${timing.resident ? ", on the device already" : ", streamed in"}${timing.preempted ? ", training was suspended" : ""}`, "", true);
  }
}

const FINAL = ["done", "failed", "cancelled", "expired"];

function showJobs() {
  const isOver = (job) => FINAL.includes(job.state); // what runs stands before what is over
  keyed($("jobs"), [...model.jobs].sort((one, other) => isOver(one) - isOver(other)), (row) => {
    const path = (verb) => `/api/jobs/${encodeURIComponent(row.name)}/${verb}`;
    const hold = button("Pause", `Pause ${row.name}`, (one) => act(one, () => server.post(path(one.dataset.verb))));
    hold.dataset.verb = "pause";
    const end = button("Cancel", `Cancel ${row.name}`, (one) => {
      if (one.classList.contains("sure")) {
        one.classList.remove("sure");
        act(one, () => server.post(path("cancel")));
        return;
      }
      one.classList.add("sure");
      one.textContent = "Sure?";
      setTimeout(() => { one.classList.remove("sure"); one.textContent = "Cancel"; }, SURE_MS);
    });
    const acts = make("div", "acts", "", hold, end, button("Details", `Details of ${row.name}`, () => showLog(row.name)));
    const spark = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    spark.setAttribute("class", "spark");
    spark.setAttribute("viewBox", "0 0 100 30");
    spark.setAttribute("preserveAspectRatio", "none");
    spark.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
    return make("li", "", "", make("div", "who"), make("p", "what"), acts, spark);
  }, (element, row) => {
    fill(element.querySelector(".who"), [make("b", "", row.name), pill(row.state)]);
    const losses = model.losses.get(row.name) || [], last = losses[losses.length - 1];
    const told = [`step ${count(row.step)}`];
    if (row.steps_per_s && row.state !== "paused" && !FINAL.includes(row.state)) told.push(`${row.steps_per_s.toFixed(row.steps_per_s < 10 ? 1 : 0)} steps/s`);
    if (last) told.push(`${last.name} ${last.value.toPrecision(3)}`);
    told.push(`suspended ${count(row.suspensions)} times`, `${count(row.steps_recomputed)} steps lost`);
    if (row.swapped_bytes) told.push(`${size(row.swapped_bytes)} in host memory`);
    if (row.lease_bytes) told.push(`${size(row.lease_bytes)} in the arena${beside(row)}`);
    if (row.committed_step >= 0) told.push(`committed: step ${count(row.committed_step)}`, `on disk: ${row.persisted_step < 0 ? "none" : `step ${count(row.persisted_step)}`}`);
    if (row.not_restored.length) told.push(`not restored after a restart: ${row.not_restored.join(", ")}`);
    if (row.error || row.why) told.push(row.error || row.why);
    element.querySelector(".what").textContent = told.join(", ");
    const [hold, end] = element.querySelectorAll("button");
    hold.dataset.verb = row.state === "paused" ? "resume" : "pause";
    hold.textContent = row.state === "paused" ? "Resume" : "Pause";
    hold.setAttribute("aria-label", `${hold.textContent} ${row.name}`);
    hold.hidden = end.hidden = FINAL.includes(row.state);
    const line = element.querySelector("polyline");
    line.parentNode.style.display = losses.length > 1 ? "" : "none";
    line.setAttribute("points", points(losses));
  }, "");
  fold("jobs", !model.jobs.length);
  $("jobs-line").textContent = model.jobs.length ? "" : "none: pipeswitch train pipeswitch.extras.demo.digits:main --name digits";
  if ($("log").open) showJob();
}

// By steps from left to right, the highest value on top.
function points(losses) {
  const values = losses.map((one) => one.value), low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
  const from = losses[0]?.step ?? 0, steps = (losses[losses.length - 1]?.step ?? 0) - from || 1;
  return losses.map(({ step, value }) => `${((100 * (step - from)) / steps).toFixed(1)},${(29 - (28 * (value - low)) / span).toFixed(1)}`).join(" ");
}

function showJob() {
  const row = model.jobs.find((one) => one.name === $("log").dataset.name);
  if (!row) return;
  const lost = (step, what) => (step < 0 ? `nothing ${what} yet` : `step ${count(step)} is ${what}`);
  const facts = { state: row.state, step: count(row.step), speed: row.steps_per_s ? `${row.steps_per_s.toFixed(1)} steps/s` : "", trained: `${row.trained_s.toFixed(1)} s`,
    "suspended": `${count(row.suspensions)} times`, swapped: `${count(row.swaps)} times`, evicted: `${count(row.evictions)} times`, restarted: `${count(row.restarts)} times`, "steps computed again": count(row.steps_recomputed),
    memory: size(row.lease_bytes) + beside(row), script: [row.entry, ...row.args].join(" "), "not restored in a later life": row.not_restored.join(", "), error: row.error, why: row.why };
  fill($("job-facts"), Object.entries(facts).filter(([, text]) => text).map(([key, text]) => term(key, text)));
  $("commits-line").textContent = `${lost(row.committed_step, "committed (restart point if a process dies)")}; ${lost(row.persisted_step, "on disk (restart point if the server dies)")}`;
  for (const [name, step] of Object.entries({ step: row.step, committed: row.committed_step, persisted: row.persisted_step })) {
    $("commits").querySelector(`.${name}`).style.width = `${(100 * Math.max(0, step)) / Math.max(1, row.step + (row.steps_left ?? 0))}%`;
  }
  const losses = model.losses.get(row.name) || [], first = losses[0], last = losses[losses.length - 1];
  $("loss-title").textContent = last ? `${last.name} ${last.value.toPrecision(4)}` : "Loss: none logged (job.log)";
  $("loss").style.display = losses.length > 1 ? "" : "none";
  $("loss").firstElementChild.setAttribute("points", points(losses));
  $("loss-from").textContent = first ? `step ${count(first.step)}: ${first.value.toPrecision(4)}` : "";
  $("loss-to").textContent = last ? `step ${count(last.step)}: ${last.value.toPrecision(4)}` : "";
}

function showRequests() {
  const answered = model.timeline.answered();
  let one = chosen === null ? null : answered.find((found) => found.flow === chosen);
  if (!one) {
    chosen = null;
    one = answered.find((found) => found.copies.length) || model.timeline.lastSwitch() || answered[0] || null;
    const isNew = one && one.flow !== shown.request?.flow;
    if (isNew && shown.request && performance.now() - shown.at < FOLLOW_MS) one = answered.find((found) => found.flow === shown.request.flow) || one;
    else if (isNew) shown.at = performance.now();
  }
  shown.request = one;
  waterfall.draw(one);
  $("request-title").textContent = one && !one.copies.length ? "Last request" : "Last switch";
  const why = one ? [make("b", "", one.model), one.copies.length ? `: ${one.copies.length} layer groups streamed in while it computed` : ": was on the device",
    ...(model.timeline.now - one.end > OLD_MS ? [`, ${ago(one.end)}`] : [])] : [model.stats?.inference.ok ? "None in the timeline" : "No request yet: press Infer, or 1"];
  fill($("request-line"), why);
  showTiming($("timing"), one);
  fold("waterfall", !one);
  fold("timings", !answered.length);
  if ($("model").open) showDetailSwitch();

  const rows = answered.slice(0, SHOWN_REQUESTS), longest = Math.max(1, ...rows.map((found) => found.timing.total));
  keyed($("timings"), rows.map((found) => ({ ...found, name: String(found.flow) })), (row) => {
    const line = make("button", "", "", make("span", "name"), make("span", "bar", "", make("span", "queue"), make("span", "switch"), make("span", "stall"), make("span", "infer")), make("span", "total"), make("span", "tags"));
    line.type = "button";
    line.addEventListener("click", () => { chosen = chosen === row.flow ? null : row.flow; dirty.add("lanes"); });
    return make("li", "", "", line);
  }, (element, row) => {
    const line = element.firstChild, timing = row.timing;
    line.querySelector(".name").textContent = row.model;
    line.querySelector(".total").textContent = ms(timing.total);
    line.querySelector(".tags").textContent = `${row.copies.length ? "cold" : "resident"}${row.preempted ? ", preempts" : ""}`;
    line.title = `${ago(row.end)}: queue ${ms(timing.queue)}, switch ${ms(timing.switch)}, copy ${ms(timing.copy)}, stall ${ms(timing.stall)}, compute ${ms(timing.compute)}`;
    line.setAttribute("aria-pressed", String(row.flow === chosen));
    const parts = { queue: timing.queue, switch: timing.switch, stall: timing.stall, infer: timing.compute };
    for (const [key, value] of Object.entries(parts)) line.querySelector(`.bar .${key}`).style.width = `${(100 * value) / longest}%`;
  }, "");
  const totals = answered.map((found) => found.timing.total).sort((a, b) => a - b);
  $("timings-line").textContent = totals.length ? `median ${ms(totals[Math.floor(totals.length / 2)])} of the last ${totals.length}${model.timeline.now - answered[0].end > OLD_MS ? `, the newest ${ago(answered[0].end)}` : ""}` : "none yet";
}

function showEvents() {
  const all = $("all-events").checked, list = $("events"), told = model.events.filter((event) => all || !NOISY.test(event.topic)).slice(0, 80);
  fold("events", !told.length);
  fill(list, told.map((event) => {
    const { topic, at, at_ms, ...rest } = event, words = [];
    for (const [key, value] of Object.entries(rest)) if (value !== "" && value !== null) words.push(`${key}=${typeof value === "object" ? JSON.stringify(value) : typeof value === "number" ? Math.round(value * 100) / 100 : value}`);
    const [kind, verb] = topic.split(".");
    return make("li", "", "", make("time", "", new Date(at).toLocaleTimeString("en", { hour12: false })), make("span", "", "", make("b", `${kind} ${verb}`, topic), ` ${words.join(" ")}`));
  }));
}

async function showLog(name) {
  const stop = new AbortController(), text = $("log-text"), dialog = $("log");
  $("log-title").textContent = name;
  text.textContent = "";
  dialog.dataset.name = name;
  dialog.showModal();
  showJob();
  model.readHistory(name).then(showJob, () => {}); // it has logged nothing
  dialog.addEventListener("close", () => stop.abort(), { once: true });
  try {
    const answer = await server.fetch(`/api/jobs/${encodeURIComponent(name)}/logs?offset=-65536&follow=true`, { signal: stop.signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      const isAtEnd = text.scrollTop + text.clientHeight > text.scrollHeight - 30;
      text.textContent = (text.textContent + piece.value).slice(-MAX_LOG);
      if (isAtEnd) text.scrollTop = text.scrollHeight;
    }
  } catch (error) { if (!stop.signal.aborted) text.textContent += `\n${error.message}`; }
}

// ---- keys, themes, the loop ---------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  palette.read();
  dirty.add("lanes");
}

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function toggleTheme() {
  const theme = isDark() ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  setTheme(theme);
}

function holdJob() {
  const job = model.jobs.find((one) => !FINAL.includes(one.state));
  if (job && (job.state === "paused" || confirm(`Pause ${job.name}?`))) act(null, () => server.post(`/api/jobs/${encodeURIComponent(job.name)}/${job.state === "paused" ? "resume" : "pause"}`));
}

const KEYS = {
  p: holdJob,
  d: toggleTheme,
  "?": () => $("help").showModal(),
  "/": () => $("find").focus(),
  "+": () => lanes.zoom(1 / 1.5),
  "=": () => lanes.zoom(1 / 1.5),
  "-": () => lanes.zoom(1.5),
  " ": () => lanes.freeze(),
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || document.querySelector("dialog[open]")) return;
  const isTyping = event.target.matches("input, select, textarea"), isButton = event.target.matches("button, a");
  if (isTyping || (isButton && (event.key === " " || event.key === "Enter")) || model.state !== "live") return;
  if (/^[1-9]$/.test(event.key)) {
    const row = shownModels[Number(event.key) - 1];
    if (row) infer(row.name);
  } else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
});

$("theme").addEventListener("click", toggleTheme);
$("help-open").addEventListener("click", KEYS["?"]);
for (const [id, kind] of [["find", "input"], ["sort", "change"]]) $(id).addEventListener(kind, () => dirty.add("rows"));
$("all-events").addEventListener("change", () => dirty.add("events"));
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  server.token = $("token").value.trim();
  $("token").value = "";
  model.refusal = null;
  model.set("starting");
  model.start();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { palette.read(); dirty.add("lanes"); });
addEventListener("resize", () => dirty.add("lanes"));

const isCalm = matchMedia("(prefers-reduced-motion: reduce)");
let drawnAt = 0;

function frame(now) {
  requestAnimationFrame(frame);
  if (model.state === "live") {
    if (!isCalm.matches || now - drawnAt > 1000) { lanes.draw(); drawnAt = now; }
    if (dirty.has("rows")) { showFacts(); showSequences(); showMemory(); showModels(); showJobs(); }
    if (dirty.has("lanes")) { showShares(); showRequests(); }
    if (dirty.has("events")) showEvents();
    dirty.clear();
  }
}

const theme = localStorage.getItem(THEME);
if (theme === "light" || theme === "dark") setTheme(theme);
showState();
model.start();
requestAnimationFrame(frame);
