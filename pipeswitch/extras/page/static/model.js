// What the page knows of the server: one stream of events, and a few listings asked again and again.
// Nothing here touches the document.

const TOKEN = "pipeswitch-token";
const LIVE_MS = 600; // between two looks at the timeline
const ROWS_MS = 1000; // between two looks at the listings, of up to
const ROWS_MODELS = 100; // models; of more ones that much less often
const HIDDEN_MS = 5000; // the same while the page is hidden
const KEPT_MS = 90000; // of the timeline
const SEAM_MS = 2; // between two spans that are one
const LOOKBACKS_S = [30, 300, 3600]; // of the first look, until it finds requests enough
const MAX_REQUESTS = 60; // that are kept, however old
const MAX_EVENTS = 300;
const RATE_LOOKS = 3; // back: tokens a second are of the looks since
const MAX_LOSSES = 240; // of a job: then every other one goes
const MAX_SEEDED = 8; // jobs whose curve is read when the page opens; others' when they are looked at
const HISTORY_BYTES = 4 << 20; // of the newest of a job's history: some 60,000 steps
const ON_DEVICE = /^(\w+:\d+) (.*)$/; // a track's name where there are several devices
const TEXT_TOKENS = 32; // of an answer that the page shows
const SILENT_MS = 40000; // the server gives a sign of life each 15 s

export class Refused extends Error {
  constructor(status, body) {
    super(body.error || `status ${status}`);
    this.status = status;
    this.hint = body.hint || "";
  }
}

export class Server {
  constructor() {
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) {
      sessionStorage.setItem(TOKEN, given);
      history.replaceState(null, "", location.pathname); // not into the history
    }
  }

  get hasToken() { return Boolean(sessionStorage.getItem(TOKEN)); }
  set token(text) { if (text) sessionStorage.setItem(TOKEN, text); else sessionStorage.removeItem(TOKEN); }

  async fetch(path, options = {}) {
    const headers = { ...(options.headers || {}) };
    const token = sessionStorage.getItem(TOKEN);
    if (token) headers.Authorization = `Bearer ${token}`;
    const answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
    if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => ({})));
    return answer;
  }

  async get(path) { return (await this.fetch(path)).json(); }
  async post(path) { return (await this.fetch(path, { method: "POST" })).json(); }

  // Some text that a language model writes after a prompt.
  async complete(name, prompt) {
    const headers = { "Content-Type": "application/json" }, body = JSON.stringify({ model: name, prompt, max_tokens: TEXT_TOKENS });
    return (await (await this.fetch("/v1/completions", { method: "POST", headers, body })).json()).choices[0].text;
  }

  // One request with made-up values; its timing.
  async infer(row) {
    const inputs = [], parts = [];
    for (const [name, [shape, dtype]] of Object.entries(row.inputs)) {
      const whole = shape.map((extent) => (typeof extent === "string" ? row.dims[extent][0] : extent));
      const bytes = madeUp(dtype, whole.reduce((a, b) => a * b, 1));
      inputs.push({ name, shape: whole, datatype: DATATYPES[dtype], parameters: { binary_data_size: bytes.byteLength } });
      parts.push(bytes);
    }
    const head = new TextEncoder().encode(JSON.stringify({ inputs, parameters: { binary_data_output: true } }));
    const answer = await this.fetch(`/v2/models/${encodeURIComponent(row.name)}/infer`, {
      method: "POST",
      headers: { "Inference-Header-Content-Length": String(head.length), "Content-Type": "application/octet-stream" },
      body: new Blob([head, ...parts]),
    });
    const body = await answer.arrayBuffer();
    const length = Number(answer.headers.get("Inference-Header-Content-Length")) || body.byteLength;
    return JSON.parse(new TextDecoder().decode(body.slice(0, length))).parameters || {};
  }
}

const DATATYPES = {
  bool: "BOOL", uint8: "UINT8", int8: "INT8", int16: "INT16", int32: "INT32", int64: "INT64",
  float16: "FP16", bfloat16: "BF16", float32: "FP32", float64: "FP64",
};

// Floats around 0; whole numbers 0 and 1, which every vocabulary has.
function madeUp(dtype, count) {
  const bit = () => Math.random() < 0.5;
  switch (dtype) {
    case "float32": return Float32Array.from({ length: count }, () => Math.random() * 2 - 1);
    case "float64": return Float64Array.from({ length: count }, () => Math.random() * 2 - 1);
    case "float16": return Uint16Array.from({ length: count }, () => 0x3400 | (Math.random() * 0x3ff));
    case "bfloat16": return Uint16Array.from({ length: count }, () => 0x3f00 | (Math.random() * 0x7f));
    case "int64": return BigInt64Array.from({ length: count }, () => (bit() ? 1n : 0n));
    case "int32": return Int32Array.from({ length: count }, bit);
    case "int16": return Int16Array.from({ length: count }, bit);
    default: return Uint8Array.from({ length: count }, bit);
  }
}

// ---- the timeline -------------------------------------------------------------------------------

export class Timeline {
  constructor() {
    this.offset = null; // of the server's clock to ours
    this.devices = [""]; // their names; one alone has none in what is told
    this.clear();
  }

  clear() {
    this.train = []; this.copy = []; this.infer = []; this.switch = [];
    this.requests = new Map(); // by flow, the number of a dispatch
    this.seen = new Set();
    this.training = new Map(); // by device, {job, begin}: has it now
    this.cold = new Map(); // by model, its last request that it had to be sent for
    this.until = null; // how far it was read
  }

  get now() { return performance.now() + (this.offset ?? 0); }

  hear(nowMs) {
    const offset = nowMs - performance.now();
    // The least delayed telling is the truest; a jump is another clock.
    if (this.offset === null || offset > this.offset || this.offset - offset > 2000) this.offset = offset;
  }

  take(trace) {
    this.hear(trace.now_ms);
    this.until = trace.now_ms;
    const tracks = new Map(), spans = [];
    for (const event of trace.traceEvents) {
      if (event.ph === "M" && event.name === "thread_name") tracks.set(event.tid, event.args.name);
      else if (event.ph === "X") {
        spans.push({ track: tracks.get(event.tid), name: event.name, begin: event.ts / 1000,
          end: (event.ts + event.dur) / 1000, args: event.args, flow: 0 });
      } else if (spans.length && event.cat === "switch") spans[spans.length - 1].flow = event.id;
    }
    for (const span of spans) this.sort(span);
    this.trim();
  }

  sort(span) {
    const key = `${span.track}|${span.name}|${span.begin}|${span.end}`;
    if (this.seen.has(key)) return;
    this.seen.add(key);
    const words = span.name.split(" "), last = words[words.length - 1];
    const [, on, track] = ON_DEVICE.exec(span.track) ?? ["", "", span.track];
    span.on = on;
    if (track === "copy" || track === "slices") {
      span.model = track === "copy" ? words[0] : span.name; // of a swap "JOB out" or "JOB in", which no model is named
      this.copy.push(span);
    } else if (track === "scheduler") {
      if (words[0] === "train") {
        span.job = last;
        this.train.push(span);
      }
      else if (words[0] === "switch") {
        const request = this.request(span.flow);
        Object.assign(request, { on, model: last, dispatched: span.begin, first: span.end,
          preempted: span.args.preempted, resident: span.args.resident });
        span.model = last;
        this.switch.push(span);
      } else if (words[0] === "queue") this.queued = span;
    } else if (words[0] === "group") this.group(span);
    else if (words[0] === "stop") {
      span.job = words[1];
      if (span.flow) this.request(span.flow).stop = span;
    } else if (span.flow) {
      const request = this.request(span.flow);
      Object.assign(request, { model: last, track: span.track, begin: span.begin, end: span.end, stall: span.args.stall_ms || 0 });
      span.model = last;
      this.infer.push(span);
    }
    if (this.queued && words[0] === "switch" && this.queued.end === span.begin) {
      this.request(span.flow).arrived = this.queued.begin;
    }
  }

  request(flow) {
    let found = this.requests.get(flow);
    if (!found) {
      found = { flow, model: "", groups: [] };
      this.requests.set(flow, found);
    }
    return found;
  }

  group(span) {
    for (const request of [...this.requests.values()].reverse().slice(0, 20)) {
      if (request.track === span.track && span.begin >= request.begin - 0.01 && span.end <= request.end + 0.01) {
        request.groups.push(span);
        return;
      }
    }
    this.seen.delete(`${span.track}|${span.name}|${span.begin}|${span.end}`); // its request comes later
  }

  trim() {
    const oldest = this.now - KEPT_MS, kept = this.answered(), flows = new Set(kept.map((one) => one.flow));
    const since = kept.reduce((first, one) => Math.min(first, one.arrived), oldest);
    for (const one of [...kept].reverse()) if (one.copies.length) this.cold.set(one.model, one);
    for (const name of ["train", "infer", "switch"]) this[name] = this[name].filter((span) => span.end > oldest);
    this.copy = this.copy.filter((span) => span.end > since);
    for (const [flow, request] of this.requests) {
      const isOld = (request.end ?? this.now) < oldest || this.requests.size > 4 * MAX_REQUESTS;
      if (isOld && !flows.has(flow)) this.requests.delete(flow);
    }
    if (this.seen.size > 20000) this.seen = new Set([...this.seen].slice(-10000));
  }

  // Answered requests, newest first, each with its timing in milliseconds.
  answered() {
    const done = [...this.requests.values()].filter((one) => one.end !== undefined && one.dispatched !== undefined);
    return done.sort((a, b) => b.end - a.end).slice(0, MAX_REQUESTS).map((one) => {
      const arrived = one.arrived ?? one.dispatched;
      const copies = one.resident ? [] : this.copy.filter((span) => span.on === one.on && span.model === one.model && span.end > arrived && span.begin < one.end);
      const copied = copies.length ? Math.max(...copies.map((c) => c.end)) - Math.min(...copies.map((c) => c.begin)) : 0;
      return { ...one, arrived, copies, timing: {
        queue: one.dispatched - arrived, switch: Math.max(0, one.first - one.dispatched), copy: copied, stall: one.stall,
        compute: Math.max(0, one.end - one.begin - one.stall), total: one.end - arrived } };
    });
  }

  // The last request for which one of these models, or any, was sent: also one that is no more among the newest.
  lastSwitch(models = this.cold.keys()) {
    return [...models].map((name) => this.cold.get(name)).filter(Boolean).sort((a, b) => b.end - a.end)[0];
  }

  // When a job had a device, without seams; the last span may be under way.
  trained(on) {
    const open = this.training.get(on), whole = [], closed = this.train.filter((span) => span.on === on);
    for (const span of [...closed, ...(open ? [{ ...open, end: this.now }] : [])].sort((a, b) => a.begin - b.begin)) {
      const last = whole[whole.length - 1];
      if (last && last.job === span.job && span.begin <= last.end + SEAM_MS) last.end = Math.max(last.end, span.end);
      else whole.push({ job: span.job, begin: span.begin, end: span.end });
    }
    return whole;
  }

  // Shares of each kind between two instants: what the devices did.
  shares(from, to) {
    const each = this.devices.map((on) => this.sharesOf(on, from, to));
    return Object.fromEntries(Object.keys(each[0]).map((kind) =>
      [kind, each.reduce((all, one) => all + one[kind], 0) / each.length]));
  }

  sharesOf(on, from, to) {
    const sum = (spans) => spans.reduce((all, span) => all + Math.max(0, Math.min(span.end, to) - Math.max(span.begin, from)), 0);
    const all = Math.max(1, to - from), infer = sum(this.infer.filter((span) => span.on === on));
    const train = Math.min(all - infer, sum(this.trained(on)));
    const stall = this.answered().filter((one) => one.on === on && one.end > from && one.end <= to).reduce((ms, one) => ms + one.stall, 0);
    const handed = Math.min(stall, infer);
    return { train: train / all, switch: handed / all, infer: (infer - handed) / all, idle: Math.max(0, all - infer - train) / all };
  }
}

// ---- all of it ----------------------------------------------------------------------------------

export class Model {
  constructor(server, changed) {
    this.server = server;
    this.changed = changed; // called with what is new: state, rows, lanes, events
    this.timeline = new Timeline();
    this.about = null; this.ps = []; this.jobs = []; this.models = []; this.stats = null;
    this.events = []; // newest first
    this.losses = new Map(); // by job
    this.texts = new Set(); // names of language models
    this.looks = []; // at sequences, oldest first: {at, up_s, by: what each model's hold}
    this.state = "starting"; // live, away, login
    this.lastId = "";
    this.isSeeded = false; // with the curves of before
    this.heardStop = new Set(); // devices whose training was heard to stop
    this.generation = 0; // of the loops: a new token ends the old ones
  }

  start() {
    const mine = ++this.generation;
    const isMine = () => mine === this.generation;
    this.repeat(isMine, () => ROWS_MS * Math.max(1, this.models.length / ROWS_MODELS), () => this.readRows());
    this.repeat(isMine, () => LIVE_MS, () => this.readTrace());
    this.listen(isMine);
  }

  set(state) {
    if (state === "login") this.generation++;
    if (state !== this.state) { this.state = state; this.changed("state"); }
  }

  // For ever: ask, wait; slower while the page is hidden and while the server is away.
  async repeat(isMine, everyMs, ask) {
    let failed = 0;
    while (isMine()) {
      try { await ask(); failed = 0; } catch (error) { failed++; if (isMine()) this.failed(error); }
      await later((document.hidden ? HIDDEN_MS : everyMs()) * Math.min(4, 1 + failed / 2));
    }
  }

  failed(error) {
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
      this.refusal = this.server.hasToken ? error : null;
      this.server.token = "";
      this.set("login");
    } else if (this.state !== "login") this.set("away");
  }

  async readRows() {
    const [about, ps, jobs, models, stats] = await Promise.all(
      ["about", "ps", "jobs", "models", "stats"].map((what) => this.server.get(`/api/${what}`)));
    if (this.about && about.pid !== this.about.pid) { this.timeline.clear(); this.losses.clear(); this.looks = []; this.isSeeded = false; this.note({ topic: "page.server", pid: about.pid }); }
    const names = (rows) => rows.map((row) => `${row.name} ${row.version}`).join();
    if (names(models.models) !== names(this.models)) {
      const texts = await this.server.get("/v1/models").catch(() => ({ data: [] }));
      this.texts = new Set(texts.data.map((one) => one.id));
    }
    Object.assign(this, { about, ps: ps.rows, jobs: jobs.jobs, models: models.models, stats });
    for (const job of this.jobs) this.keepLoss(job.name, job.step, job.log);
    if (!this.isSeeded) {
      this.isSeeded = true;
      for (const job of this.jobs.filter((one) => one.step > 0).slice(-MAX_SEEDED)) this.readHistory(job.name).catch(() => {});
    }
    const line = this.timeline, several = about.device.split(",");
    line.devices = several.length > 1 ? several : [""];
    for (const on of line.devices) {
      const running = this.jobs.find((job) => job.state === "running" && (job.on ?? "") === on);
      if (!running) line.training.delete(on);
      else if (!line.training.has(on) && line.offset !== null && !this.heardStop.has(on)) {
        line.training.set(on, { job: running.name, begin: line.now });
      }
    }
    if (line.offset !== null) this.looks.push({ at: line.now, up_s: stats.up_s, by: stats.sequences_by_model });
    while (this.looks[0]?.at < line.now - KEPT_MS) this.looks.shift();
    this.set("live");
    this.changed("rows");
  }

  // Of one model's sequences, or of all.
  sequences(name = null, look = this.looks[this.looks.length - 1]) {
    const sum = { sequences: 0, sequence_bytes: 0, spare_bytes: 0, tokens: 0 };
    const rows = name === null ? Object.values(look?.by ?? {}) : [look?.by[name] ?? sum];
    for (const row of rows) for (const key of Object.keys(sum)) sum[key] += row[key];
    return sum;
  }

  tokensPerS(name = null, from = Math.max(0, this.looks.length - 1 - RATE_LOOKS), to = this.looks.length - 1) {
    const [first, last] = [this.looks[from], this.looks[to]], tokens = (look) => this.sequences(name, look).tokens;
    return first && last && last.up_s > first.up_s ? Math.max(0, tokens(last) - tokens(first)) / (last.up_s - first.up_s) : 0;
  }

  async readTrace() {
    const line = this.timeline, look = async (seconds) =>
      line.take(await this.server.get(`/api/trace?seconds=${Math.max(1, Math.min(3600, seconds)).toFixed(2)}`));
    if (line.until !== null) await look((line.now - line.until) / 1000 + 2);
    else for (const seconds of LOOKBACKS_S) if (line.answered().length < MAX_REQUESTS) await look(seconds);
    this.changed("lanes");
  }

  // What a job logged before the page was open, from its file: thinned, oldest first.
  async readHistory(job) {
    const answer = await this.server.fetch(`/api/jobs/${encodeURIComponent(job)}/history?offset=-${HISTORY_BYTES}`);
    const kept = [];
    for (const line of (await answer.text()).split("\n")) {
      try { add(kept, JSON.parse(line), Infinity); } catch { /* cut off by the offset, or by a death */ }
    }
    const every = Math.ceil(kept.length / MAX_LOSSES);
    if (kept.length) this.losses.set(job, kept.filter((_, index) => (kept.length - 1 - index) % every === 0));
  }

  // The stream of events. EventSource cannot send a token, so it is read by hand.
  async listen(isMine) {
    while (isMine()) {
      const stop = new AbortController();
      let alarm = setTimeout(() => stop.abort(), SILENT_MS);
      try {
        const headers = this.lastId ? { "Last-Event-ID": this.lastId } : {};
        const answer = await this.server.fetch("/api/events", { headers, signal: stop.signal });
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = "";
        while (isMine()) {
          const { value, done } = await reader.read();
          if (done) break;
          clearTimeout(alarm);
          alarm = setTimeout(() => stop.abort(), SILENT_MS);
          text += value;
          const records = text.split("\n\n");
          text = records.pop();
          for (const record of records) this.heard(record);
          this.changed("events");
        }
      } catch (error) { if (isMine()) this.failed(error); }
      clearTimeout(alarm);
      stop.abort();
      await later(1000);
    }
  }

  heard(record) {
    let name = "message", data = "";
    for (const line of record.split("\n")) {
      if (line.startsWith("id: ")) this.lastId = line.slice(4);
      else if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data = line.slice(6);
    }
    if (!data) return;
    const event = JSON.parse(data);
    if (name === "hello") this.timeline.hear(event.now_ms);
    else if (name === "dropped") this.note({ topic: "page.dropped", count: event.count ?? "some" });
    else this.happened(event);
  }

  happened(event) {
    const line = this.timeline, on = event.device ?? "";
    if (event.topic === "job.progress") this.keepLoss(event.job, event.step, event.log);
    if (event.topic === "job.dispatched" || event.topic === "job.resumed_in_place") {
      line.training.set(on, { job: event.job, begin: event.at_ms });
      this.heardStop.delete(on);
    } else if (/^job\.(suspended|paused|done|failed|cancelled|queued|expired)$/.test(event.topic) && line.training.get(on)?.job === event.job) {
      line.train.push({ on, begin: line.training.get(on).begin, end: event.at_ms, job: event.job });
      line.training.delete(on);
      this.heardStop.add(on); // the listings may be older than this
    }
    const job = this.jobs.find((one) => one.name === event.job);
    if (job && event.topic === "job.progress") job.step = event.step;
    this.note(event);
  }

  note(event) {
    this.events.unshift({ ...event, at: Date.now() });
    if (this.events.length > MAX_EVENTS) this.events.length = MAX_EVENTS;
  }

  keepLoss(job, step, log) {
    if (!log || typeof log !== "object") return;
    const kept = this.losses.get(job) || [];
    add(kept, { step, ...log });
    if (kept.length) this.losses.set(job, kept);
  }
}

// One more point of a curve, in the order of steps; those that are computed again take the old ones' place.
function add(kept, row, most = MAX_LOSSES) {
  const values = Object.entries(row).filter(([name, value]) => name !== "step" && Number.isFinite(value));
  const found = values.find(([name]) => name.includes("loss"));
  if (!found || !Number.isFinite(row.step)) return;
  while (kept.length && kept[kept.length - 1].step >= row.step) kept.pop();
  kept.push({ step: row.step, name: found[0], value: found[1] });
  if (kept.length > most) kept.splice(0, kept.length, ...kept.filter((_, index) => index % 2 || index === kept.length - 1));
}

export function later(ms) { return new Promise((done) => setTimeout(done, ms)); }
