// A second client of offloadd, written from docs/protocol.md alone: draws one picture, tells its
// progress, and outlives a restart of the daemon.
//
//   npm install
//   node generate.js MODEL PROMPT FILE.png [SEED]
//
// Exit status: 0 done, 1 the daemon refused or failed, 2 wrong usage, 3 no daemon reached.

import { randomBytes } from "node:crypto";
import { existsSync, writeFileSync } from "node:fs";
import { connect } from "node:net";
import { crc32, deflateSync } from "node:zlib";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const VERSION = 1;
const HELLO_MS = 2000;
const CHANNELS = { L: [1, 0], RGB: [3, 2], RGBA: [4, 6] }; // bytes a pixel, PNG colour type

function endpoint() {
  if (process.env.OFFLOADD_ENDPOINT) return process.env.OFFLOADD_ENDPOINT;
  const mine = `${process.env.XDG_RUNTIME_DIR}/offloadd/offloadd.sock`;
  return `ipc://${process.env.XDG_RUNTIME_DIR && existsSync(mine) ? mine : "/run/offloadd/offloadd.sock"}`;
}

function leave(status, sentence) {
  process.stderr.write(`${sentence}\n`);
  process.exit(status);
}

// ZeroMQ would wait in silence for a daemon that is not there; an ordinary socket is told at once.
function probe(address) {
  const tcp = address.startsWith("tcp://") ? new URL(address) : null;
  const place = tcp ? { host: tcp.hostname, port: Number(tcp.port) } : { path: address.slice(6) };
  return new Promise((found) => {
    const socket = connect(place, () => socket.end(found));
    socket.on("error", (error) => leave(3, `no daemon at ${address}: ${error.code}`));
  });
}

function png(frame, mode, [width, height]) {
  const [channels, colourType] = CHANNELS[mode];
  const row = width * channels;
  const raw = Buffer.alloc(height * (row + 1)); // each row begins with its filter, 0
  for (let y = 0; y < height; y++) frame.copy(raw, y * (row + 1) + 1, y * row, (y + 1) * row);
  const chunk = (name, data) => {
    const body = Buffer.concat([Buffer.from(name), data]);
    const ends = [Buffer.alloc(4), Buffer.alloc(4)];
    ends[0].writeUInt32BE(data.length);
    ends[1].writeUInt32BE(crc32(body));
    return Buffer.concat([ends[0], body, ends[1]]);
  };
  const header = Buffer.alloc(13);
  header.writeUInt32BE(width, 0);
  header.writeUInt32BE(height, 4);
  header.set([8, colourType], 8);
  const signature = Buffer.from("89504e470d0a1a0a", "hex");
  const parts = [chunk("IHDR", header), chunk("IDAT", deflateSync(raw)), chunk("IEND", Buffer.alloc(0))];
  return Buffer.concat([signature, ...parts]);
}

const [model, prompt, file, seed] = process.argv.slice(2);
if (!file) leave(2, "usage: node generate.js MODEL PROMPT FILE.png [SEED]");
const address = endpoint();
await probe(address);

const socket = new Dealer({ immediate: true, linger: 500, heartbeatInterval: 2000, heartbeatTimeout: 6000, reconnectMaxInterval: 1000 });
const session = randomBytes(16).toString("hex");
const job = randomBytes(16).toString("hex");
let lastRid = 0;
let helloRid;
let sending = Promise.resolve();
let end; // the message that the job has ended
let pieces = []; // of its frames, one behind the other
let pieceRid; // of the piece that is under way

// One message at a time: the socket refuses a second send while the first waits.
function say(request) {
  const rid = ++lastRid;
  sending = sending.then(() => socket.send(encode({ ...request, rid })));
  return rid;
}

// Where a frame of a large result begins, if all are one behind the other.
function start(frame) {
  return end.sizes.slice(0, frame).reduce((sum, size) => sum + size, 0);
}

// A large result is read piece by piece. Pieces end where frames do.
function readNext() {
  const sizes = end.sizes ?? [];
  const have = sizes.length ? pieces.reduce((sum, piece) => sum + piece.length, 0) : 0;
  const frame = sizes.findIndex((_, index) => have < start(index + 1));
  pieceRid = frame < 0 ? undefined : say({ op: "read", job, frame, offset: have - start(frame) });
}

// Each new connection begins with hello; the answer is followed by the job, under the same id.
let helloTimer = setTimeout(() => leave(3, `no answer from ${address}`), HELLO_MS);
socket.events.on("handshake", () => {
  helloRid = say({ op: "hello", version: VERSION, session, program: "node example" });
});
socket.connect(address);

for await (const [body, ...frames] of socket) {
  const message = decode(body, { useBigInt64: true });
  if (message.type === "error") {
    if (message.error.details?.hello_required) continue;
    leave(1, `${message.error.code}: ${message.error.message}`);
  } else if (message.type === "reply" && message.rid === helloRid) {
    clearTimeout(helloTimer);
    const options = seed === undefined ? {} : { seed: Number(seed) };
    say({ op: "submit", job, model, arguments: { prompt }, ...options });
  } else if (message.type === "reply" && message.rid === pieceRid) {
    pieces.push(frames[0]);
    readNext();
  } else if (message.type === "progress" && message.job === job) {
    const where = message.position ? `place ${message.position}` : `${message.step ?? 0}/${message.steps ?? 0}`;
    process.stdout.write(`${message.state} ${where}\n`);
  } else if (message.type === "finished" && message.job === job) {
    end = message;
    pieces = frames;
    if (message.error) leave(1, `${message.error.code}: ${message.error.message}`);
    readNext();
  }
  if (end && pieceRid === undefined) break;
}
say({ op: "taken", job });
await sending;
const image = end.outcome.outputs.images[0];
const { $image: index } = image;
const picture = end.sizes?.length ? Buffer.concat(pieces).subarray(start(index), start(index + 1)) : pieces[index];
writeFileSync(file, png(picture, image.mode, image.size));
process.stdout.write(`done seed ${end.outcome.seeds[0]} ${file}\n`);
socket.close();
