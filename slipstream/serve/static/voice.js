"use strict";
// The page's microphone: one spoken conversation over /v1/realtime. Shown where the server has that route.
// Sound goes out as 16-bit samples at 24 kHz; answers are played as they come, and fall silent when one speaks.

const RATE = 24000;
let talk = null;

const encode = (bytes) => {
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(text);
};

class Talk {
  constructor() { this.playing = new Set(); this.until = 0; this.turn = null; }

  async start() {
    this.sound = await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: true, channelCount: 1 } });
    this.context = new AudioContext({ sampleRate: RATE });
    const query = "?model=" + encodeURIComponent($("model").textContent);
    this.socket = new WebSocket(location.origin.replace(/^http/, "ws") + "/v1/realtime" + query);
    this.socket.onmessage = (message) => this.on(JSON.parse(message.data));
    this.socket.onclose = () => this.stop();
    const source = this.context.createMediaStreamSource(this.sound);
    this.taker = this.context.createScriptProcessor(4096, 1, 1);
    this.taker.onaudioprocess = (event) => this.send(event.inputBuffer.getChannelData(0));
    source.connect(this.taker);
    this.taker.connect(this.context.destination);
  }

  send(samples) {
    if (this.socket.readyState !== WebSocket.OPEN) return;
    const pcm = Int16Array.from(samples, (x) => Math.max(-1, Math.min(1, x)) * 32767);
    this.socket.send(JSON.stringify({ type: "input_audio_buffer.append", audio: encode(new Uint8Array(pcm.buffer)) }));
  }

  on(event) {
    if (event.type === "input_audio_buffer.speech_started") this.silence();
    else if (event.type === "conversation.item.input_audio_transcription.completed") {
      if (event.transcript) addTurn("user", event.transcript);
    } else if (event.type === "response.output_audio_transcript.delta") {
      if (!this.turn) this.turn = addTurn("assistant open", "");
      this.turn.textContent += event.delta;
      $("log").scrollTop = $("log").scrollHeight;
    } else if (event.type === "response.output_audio.delta") this.play(event.delta);
    else if (event.type === "response.done") {
      if (this.turn) this.turn.classList.remove("open");
      this.turn = null;
      if (event.response.status === "failed") addTurn("error", event.response.status_details.error.message);
    } else if (event.type === "error") addTurn("error", event.error.message);
  }

  play(data) {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    const pcm = new Int16Array(bytes.buffer);
    const buffer = this.context.createBuffer(1, pcm.length, RATE);
    buffer.copyToChannel(Float32Array.from(pcm, (x) => x / 32768), 0);
    const node = this.context.createBufferSource();
    node.buffer = buffer;
    node.connect(this.context.destination);
    this.until = Math.max(this.until, this.context.currentTime);
    node.start(this.until);
    this.until += buffer.duration;
    this.playing.add(node);
    node.onended = () => this.playing.delete(node);
  }

  silence() {
    for (const node of this.playing) node.stop();
    this.playing.clear();
    this.until = 0;
  }

  stop() {
    if (talk !== this) return;
    talk = null;
    this.silence();
    this.taker.disconnect();
    for (const track of this.sound.getTracks()) track.stop();
    this.context.close();
    this.socket.close();
    show();
  }
}

function show() {
  $("talk").textContent = talk ? "Hang up" : "Talk";
  $("talk").setAttribute("aria-pressed", String(Boolean(talk)));
}

$("talk").addEventListener("click", async () => {
  if (talk) return talk.stop();
  const fresh = new Talk();
  try {
    await fresh.start();
    talk = fresh;
  } catch (error) {
    addTurn("error", "The microphone cannot be used: " + error.message);
  }
  show();
});

// The button is there where the server speaks and a browser can reach it: a key cannot travel with a WebSocket from a page.
(async () => {
  const spec = await (await fetch("/openapi.json")).json().catch(() => ({ paths: {} }));
  $("talk").hidden = !(spec.paths && spec.paths["/v1/audio/speech"]) || !navigator.mediaDevices;
})();
