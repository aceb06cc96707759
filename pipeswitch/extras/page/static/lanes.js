// Two drawings on canvases: the devices' lanes moving by, and one request in its milliseconds.

const LAG_MS = 1300; // the right edge: by then what is to be drawn has been told
const LANES = ["train", "switch", "infer"];
const LEFT = 58; // of the lanes: their names
const AXIS = 20; // below them
const NAME = 18; // above a device's lanes, where there are several
const LEVEL = 46; // of a lane below them that has a height: tokens a second, what sequences hold

// The page's colours, as the canvas wants them.
export class Palette {
  constructor() {
    this.probe = document.createElement("span");
    this.probe.hidden = true;
    document.body.append(this.probe);
    this.read();
  }

  read() {
    for (const name of ["train", "switch", "infer", "idle", "text", "quiet", "line", "card", "sunken", "on"]) {
      this.probe.style.color = `var(--${name})`;
      this[name] = getComputedStyle(this.probe).color;
    }
    this.font = getComputedStyle(document.body).fontFamily;
  }
}

// Ready to draw in CSS pixels; null while it is not shown.
function fitted(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas, scale = devicePixelRatio || 1;
  if (!width || !height) return null;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

function bar(pen, x, y, width, height, radius) {
  pen.beginPath();
  pen.roundRect(x, y, width, height, Math.min(radius, width / 2, height / 2));
  pen.fill();
}

// Text inside of a box, if it fits; what is cut off would be read wrong.
function label(pen, text, x, y, room, colour) {
  if (room < 18 || pen.measureText(text).width > room) return;
  pen.fillStyle = colour;
  pen.fillText(text, x, y);
}

export class Lanes {
  constructor(canvas, timeline, palette) {
    // levels: {name, colour, told, steps: [{begin, end, height}]}
    Object.assign(this, { canvas, timeline, palette, levels: [], seconds: innerWidth < 560 ? 5 : 9, frozenAt: null });
  }

  zoom(factor) { this.seconds = Math.min(60, Math.max(1.5, this.seconds * factor)); }

  freeze() { this.frozenAt = this.frozenAt === null ? this.timeline.now - LAG_MS : null; }

  draw() {
    const stage = fitted(this.canvas), line = this.timeline, colours = this.palette;
    if (!stage || line.offset === null) return;
    const { pen, width, height } = stage;
    const to = this.frozenAt ?? line.now - LAG_MS, from = to - this.seconds * 1000;
    const scale = (width - LEFT) / (to - from), x = (ms) => LEFT + (ms - from) * scale;
    const under = height - AXIS - this.levels.length * LEVEL, block = under / line.devices.length, head = line.devices[0] ? NAME : 0;
    const lane = (block - head) / 3, deep = lane - 8;
    const tops = line.devices.map((_, number) => (index) => number * block + head + index * lane + 3);
    pen.font = `600 12px ${colours.font}`;
    pen.textBaseline = "middle";
    tops.forEach((top, number) => {
      pen.fillStyle = colours.quiet;
      pen.fillText(line.devices[number], 0, top(0) - head / 2);
      LANES.forEach((name, index) => {
        pen.fillStyle = colours.sunken;
        bar(pen, LEFT, top(index), width - LEFT, deep, 6);
        pen.fillStyle = colours[name];
        pen.fillText(name[0].toUpperCase() + name.slice(1), 0, top(index) + deep / 2);
      });
    });
    this.levels.forEach(({ name, told }, index) => {
      const top = under + index * LEVEL + 3;
      pen.fillStyle = colours.sunken;
      bar(pen, LEFT, top, width - LEFT, LEVEL - 8, 6);
      pen.fillStyle = colours.text;
      pen.fillText(name, 0, top + 12);
      pen.fillStyle = colours.quiet;
      pen.fillText(told, 0, top + 27);
    });
    this.axis(pen, from, to, x, height, width);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, height - AXIS);
    pen.clip();
    tops.forEach((top, number) => this.device(pen, line.devices[number], x, from, to, top, deep));
    this.levels.forEach((level, index) => this.level(pen, level, x, under + index * LEVEL + 3, LEVEL - 8));
    pen.restore();
  }

  device(pen, on, x, from, to, top, deep) {
    const colours = this.palette, infer = this.timeline.infer.filter((span) => span.on === on);
    this.aside(pen, on, x, from, to, top, deep);
    for (const span of this.timeline.trained(on)) this.box(pen, span, x, top(0), deep, colours.train, span.job);
    this.copies(pen, on, x, from, to, top(1), deep);
    for (const span of infer) this.box(pen, span, x, top(2), deep, colours.infer, span.model);
    this.beside(pen, infer, x, top(2) + deep / 2 + 1);
  }

  // As high as the lane: the highest of all that is kept, so that the scale stays.
  level(pen, { colour, steps }, x, top, deep) {
    const most = Math.max(...steps.map(({ height }) => height), 1e-9);
    pen.fillStyle = this.palette[colour];
    for (const { begin, end, height } of steps) {
      const tall = (height / most) * (deep - 2), left = Math.round(x(begin)); // whole pixels: no seams
      pen.fillRect(left, top + deep - tall, Math.round(x(end)) - left, tall);
    }
  }

  // Names of boxes that are too narrow for them, where nothing follows too soon.
  beside(pen, spans, x, y) {
    const sorted = [...spans].sort((a, b) => a.begin - b.begin);
    sorted.forEach((span, index) => {
      const left = x(span.end), long = pen.measureText(span.model).width, next = sorted[index + 1];
      if (x(span.end) - x(span.begin) > long + 14 || left < LEFT) return;
      const edge = Math.min(next ? x(next.begin) : Infinity, this.canvas.clientWidth);
      label(pen, span.model, left + 6, y, edge - left - 10, this.palette.quiet);
    });
  }

  box(pen, span, x, y, deep, colour, text) {
    const left = x(span.begin), right = x(span.end);
    if (right < LEFT || left > this.canvas.clientWidth) return;
    pen.fillStyle = colour;
    const wide = Math.max(1.5, right - left);
    bar(pen, left, y, wide, deep, 5);
    const begin = Math.max(left, LEFT) + 8;
    label(pen, text, begin, y + deep / 2 + 1, Math.min(right, this.canvas.clientWidth) - begin - 6, this.palette.on);
  }

  // Each layer group as it was copied: a model that streams in. What was there already has none.
  copies(pen, on, x, from, to, y, deep) {
    const models = new Map();
    for (const span of this.timeline.copy) {
      if (span.on !== on || span.end < from || span.begin > to) continue;
      pen.fillStyle = this.palette.switch;
      const left = x(span.begin), wide = x(span.end) - left;
      bar(pen, left, y, Math.max(1.2, wide - (wide > 3 ? 1 : 0)), deep, 3);
      const key = `${span.model} ${span.flow}`, whole = models.get(key);
      models.set(key, { model: span.model, begin: Math.min(span.begin, whole?.begin ?? Infinity), end: Math.max(span.end, whole?.end ?? 0) });
    }
    this.beside(pen, models.values(), x, y + deep / 2 + 1);
  }

  // From the lane of training to that of inference: this is when training was suspended.
  aside(pen, on, x, from, to, top, deep) {
    pen.fillStyle = this.palette.idle;
    pen.globalAlpha = 0.35;
    for (const one of this.timeline.requests.values()) {
      if (one.on !== on || !one.preempted || one.end === undefined || one.end < from || one.dispatched > to) continue;
      const left = x(one.dispatched);
      pen.fillRect(left, top(0), Math.max(2, x(one.end) - left), top(2) + deep - top(0));
    }
    pen.globalAlpha = 1;
  }

  axis(pen, from, to, x, height, width) {
    const step = [250, 500, 1000, 2000, 5000, 10000].find((ms) => (ms * (width - LEFT)) / (to - from) > 64) || 10000;
    pen.font = `11px ${this.palette.font}`;
    pen.fillStyle = this.palette.quiet;
    pen.strokeStyle = this.palette.line;
    for (let ago = step; ago <= to - from; ago += step) {
      const at = Math.round(x(to - ago)) + 0.5;
      pen.fillText(`-${ago / 1000} s`, at + 4, height - AXIS / 2 + 3);
      pen.beginPath();
      pen.moveTo(at, 0);
      pen.lineTo(at, height - AXIS + 6);
      pen.stroke();
    }
    pen.fillText(this.frozenAt === null ? "" : "frozen", 0, height - AXIS / 2 + 3);
    pen.font = `600 12px ${this.palette.font}`;
  }

  summary() {
    const to = this.timeline.now - LAG_MS;
    return { shares: this.timeline.shares(to - 10000, to), from: to - 10000, to };
  }
}

export class Waterfall {
  constructor(canvas, palette) { Object.assign(this, { canvas, palette }); }

  draw(request) {
    const stage = fitted(this.canvas), colours = this.palette;
    if (!stage) return;
    const { pen, width, height } = stage;
    if (!request) return;
    const lane = (height - AXIS) / 3, deep = lane - 8, from = request.arrived;
    const copied = request.copies.reduce((end, span) => Math.max(end, span.end), 0);
    const to = Math.max(request.end, copied), span = Math.max(1, to - from);
    const x = (ms) => LEFT + ((ms - from) / span) * (width - LEFT - 2);
    pen.font = `600 12px ${colours.font}`;
    pen.textBaseline = "middle";
    LANES.forEach((name, index) => {
      pen.fillStyle = colours.sunken;
      bar(pen, LEFT, index * lane + 3, width - LEFT, deep, 5);
      pen.fillStyle = colours[name];
      pen.fillText(name[0].toUpperCase() + name.slice(1), 0, index * lane + 3 + deep / 2);
    });
    const block = (begin, end, index, colour, gap = 1) => {
      pen.fillStyle = colour;
      const left = Math.max(LEFT, x(begin)), wide = Math.max(1.2, x(end) - left - gap);
      bar(pen, left, index * lane + 3, wide, deep, 3);
      return [left, wide];
    };
    if (request.stop) {
      const [left, wide] = block(from, request.stop.end, 0, colours.train);
      label(pen, "stops", left + 5, 3 + deep / 2 + 1, wide - 8, colours.on);
      const after = x(request.stop.end) + 8;
      label(pen, "suspended", after, 3 + deep / 2 + 1, width - after, colours.quiet);
    }
    if (!request.copies.length) label(pen, "already on the device", LEFT + 8, lane + 3 + deep / 2 + 1, width - LEFT - 8, colours.quiet);
    for (const copy of request.copies) block(copy.begin, copy.end, 1, colours.switch);
    if (request.groups.length) for (const group of request.groups) block(group.begin, group.end, 2, colours.infer);
    else block(request.begin, request.end, 2, colours.infer);
    pen.font = `11px ${colours.font}`;
    pen.fillStyle = colours.quiet;
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((ms) => (ms / span) * (width - LEFT) > 54) || 10000;
    for (let at = 0; at <= span; at += step) {
      const text = `${at} ms`;
      if (x(from + at) + pen.measureText(text).width < width) pen.fillText(text, x(from + at), height - AXIS / 2 + 2);
    }
  }
}
