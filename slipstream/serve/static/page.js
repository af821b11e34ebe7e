"use strict";
// The page: a chat, how fast it goes, and what the ranks do. It talks to the server that it came from and to nobody else.

const $ = (id) => document.getElementById(id);
const COLORS = {
  device: "#3d8bfd", plan: "#f0a202", publish: "#b07cf0", launch: "#2fb380", settle: "#e4572e",
  "device idle": "#e03131",
};
const messages = [];
let key = sessionStorage.getItem("slipstream-key") || "";
let running = null;

function call(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.Authorization = "Bearer " + key;
  return fetch(path, { ...options, headers });
}

// --- start, and the key

async function connect() {
  let response;
  try {
    response = await call("/v1/models");
  } catch {
    setTimeout(connect, 2000);
    return;
  }
  if (response.status === 401) {
    if (key) $("key-note").textContent = "That key was not right.";
    $("key-form").hidden = false;
    $("key").focus();
    return;
  }
  $("key-form").hidden = true;
  $("model").textContent = (await response.json()).data[0].id;
  $("prompt").focus();
  watchGauges();
  watchTimeline();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("slipstream-key", key);
  connect();
});

// --- chat

function addTurn(kind, text) {
  const hint = $("log").querySelector(".hint");
  if (hint) hint.remove();
  const turn = document.createElement("div");
  turn.className = "turn " + kind;
  turn.textContent = text;
  $("log").append(turn);
  turn.scrollIntoView({ block: "end" });
  return turn;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

const quantile = (sorted, q) => sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];

// Times of one answer. Several tokens may come in one event; the gap is shared among them.
class Speed {
  constructor() { this.begun = performance.now(); this.first = 0; this.last = 0; this.tokens = 0; this.gaps = []; }

  take(tokens) {
    const now = performance.now();
    const fresh = tokens - this.tokens;
    if (fresh <= 0) return;
    if (!this.first) this.first = now;
    else for (let i = 0; i < fresh; i++) this.gaps.push((now - this.last) / fresh);
    this.last = now;
    this.tokens = tokens;
  }

  show() {
    if (!this.first) return;
    $("ttft").textContent = (this.first - this.begun).toFixed(0);
    const sorted = [...this.gaps].sort((a, b) => a - b);
    if (!sorted.length) return;
    $("itl").textContent = quantile(sorted, 0.5).toFixed(1);
    $("itl99").textContent = quantile(sorted, 0.99).toFixed(1);
    $("rate").textContent = (this.gaps.length / (this.last - this.first) * 1000).toFixed(1);
  }

  summary() {
    const itl = this.gaps.length ? `, ${((this.last - this.first) / this.gaps.length).toFixed(1)} ms each` : "";
    return `${this.tokens} tokens, first after ${(this.first - this.begun).toFixed(0)} ms${itl}`;
  }
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  addTurn("user", text);
  messages.push({ role: "user", content: text });
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const turn = addTurn("assistant open", "");
  const speed = new Speed();
  let answer = "";
  try {
    const response = await call("/v1/chat/completions", {
      method: "POST",
      signal: running.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        messages, stream: true, temperature: Number($("temperature").value), max_tokens: Number($("max-tokens").value),
        stream_options: { include_usage: true, continuous_usage_stats: true },
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) speed.take(event.usage.completion_tokens);
      const content = event.choices[0] && event.choices[0].delta.content;
      if (content) {
        answer += content;
        turn.textContent = answer;
        $("log").scrollTop = $("log").scrollHeight;
      }
      speed.show();
    }
  } catch (error) {
    if (error.name !== "AbortError") addTurn("error", error.message);
  } finally {
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    turn.classList.remove("open");
    if (answer) messages.push({ role: "assistant", content: answer });
    else { turn.remove(); messages.pop(); }
    if (speed.tokens) {
      const footer = document.createElement("footer");
      footer.textContent = speed.summary();
      turn.append(footer);
    }
    $("log").scrollTop = $("log").scrollHeight;
  }
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages.length = 0;
  $("log").replaceChildren();
});

// --- gauges

function sums(text, name, label) {
  const out = {};
  for (const line of text.split("\n")) {
    if (!line.startsWith(name + "{") && !line.startsWith(name + " ")) continue;
    const found = label && line.match(new RegExp(label + '="([^"]*)"'));
    const at = found ? found[1] : "";
    out[at] = (out[at] || 0) + Number(line.slice(line.lastIndexOf(" ")));
  }
  return out;
}

async function watchGauges() {
  try {
    const [health, metrics] = await Promise.all([call("/health"), call("/metrics")]);
    const state = $("state");
    state.className = "state " + (health.ok ? "ok" : "bad");
    state.textContent = health.ok ? "ready" : (await health.json()).reason;
    const text = await metrics.text();
    const one = (name) => sums(text, "slipstream:" + name)[""] || 0;
    $("running").textContent = one("num_requests_running");
    $("waiting").textContent = one("num_requests_waiting");
    $("cache").textContent = (one("kv_cache_usage_perc") * 100).toFixed(0) + " %";
    const steps = sums(text, "slipstream:steps_total", "order");
    const all = Object.values(steps).reduce((a, b) => a + b, 0);
    $("overlap").textContent = all ? ((1 - (steps.no_overlap || 0) / all) * 100).toFixed(0) + " %" : "–";
  } catch {
    $("state").className = "state bad";
    $("state").textContent = "no connection";
  }
  setTimeout(watchGauges, document.hidden ? 5000 : 1000);
}

// --- timeline

let trace = [];
let frozen = false;

$("freeze").addEventListener("click", () => {
  frozen = !frozen;
  $("freeze").setAttribute("aria-pressed", frozen);
});
$("window").addEventListener("change", draw);
addEventListener("resize", draw);

for (const [name, color] of Object.entries(COLORS)) {
  const item = document.createElement("li");
  const swatch = document.createElement("i");
  swatch.style.background = color;
  item.append(swatch, name);
  $("legend").append(item);
}

async function watchTimeline() {
  if (!frozen && !document.hidden) {
    try {
      const response = await call("/debug/timeline?seconds=" + (Number($("window").value) + 1));
      if (response.status === 404) {
        $("timeline-note").textContent = "Start the server with --enable-debug to see what each rank does, and where its device idles.";
        $("timeline").hidden = $("legend").hidden = true;
        return;
      }
      const fresh = (await response.json()).traceEvents;
      if (fresh.some((e) => e.ph === "X" && e.name === "device") || !trace.length) trace = fresh;
      draw();
    } catch { /* the gauges say so */ }
  }
  setTimeout(watchTimeline, 500);
}

function lanes() {
  const names = new Map();
  for (const e of trace) if (e.name === "process_name") names.set(e.pid, e.args.name);
  return [...names].sort((a, b) => a[0] - b[0]);
}

// Where the device idled between the first and the last of its spans in view: [[from, to], ...] and the share of that time.
function idleGaps(spans) {
  if (spans.length < 2) return { gaps: [], share: null };
  const gaps = [];
  let idle = 0, end = spans[0].ts + spans[0].dur;
  for (const s of spans) {
    if (s.ts > end) {
      gaps.push([end, s.ts]);
      idle += s.ts - end;
    }
    end = Math.max(end, s.ts + s.dur);
  }
  return { gaps, share: idle / (end - spans[0].ts) };
}

function draw() {
  const canvas = $("timeline"), ranks = lanes();
  if (!ranks.length) {
    $("timeline-note").textContent = "Nothing has run yet.";
    return;
  }
  const spans = trace.filter((e) => e.ph === "X");
  const seconds = Number($("window").value);
  const device = spans.filter((e) => e.name === "device");
  const last = device.length ? device : spans;
  const right = last.reduce((a, e) => Math.max(a, e.ts + e.dur), 0), left = right - seconds * 1e6;
  const width = canvas.clientWidth, rowHeight = 58, height = ranks.length * rowHeight + 18, scale = devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), css = getComputedStyle(document.body);
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif";
  const x = (ts) => (ts - left) / (right - left) * width;
  const notes = [];
  ranks.forEach(([pid, name], i) => {
    const top = i * rowHeight;
    pen.fillStyle = css.getPropertyValue("--soft");
    pen.fillText(name, 0, top + 11);
    const mine = spans.filter((e) => e.pid === pid && e.ts + e.dur >= left);
    for (const [thread, y] of [[1, top + 16], [2, top + 35]]) {
      pen.fillStyle = css.getPropertyValue("--lane");
      pen.fillRect(0, y, width, 16);
      for (const e of mine) {
        if (e.tid !== thread || e.name === "idle") continue;
        pen.fillStyle = COLORS[e.name] || "#888";
        pen.fillRect(x(e.ts), y, Math.max(0.6, e.dur / (right - left) * width), 16);
      }
    }
    const { gaps, share } = idleGaps(mine.filter((e) => e.tid === 2));
    pen.fillStyle = COLORS["device idle"];
    for (const [from, to] of gaps) pen.fillRect(x(from), top + 46, Math.max(0.6, x(to) - x(from)), 5);
    if (share !== null) notes.push(`${ranks.length > 1 ? name + " " : ""}${(share * 100).toFixed(1)} %`);
  });
  drawScale(pen, css, width, height, seconds);
  $("timeline-note").textContent = (notes.length ? "Device idle between the steps in view: " + notes.join(", ") + "." : "") || "Upper lane: the loop. Lower lane: the device.";
}

function drawScale(pen, css, width, height, seconds) {
  pen.fillStyle = css.getPropertyValue("--soft");
  for (let i = 0; i <= 4; i++) {
    const at = width * i / 4;
    pen.textAlign = i === 0 ? "left" : i === 4 ? "right" : "center";
    pen.fillText(i === 4 ? "now" : `−${(seconds * (4 - i) / 4 * 1000).toFixed(0)} ms`, at, height - 3);
  }
  pen.textAlign = "left";
}

connect();
