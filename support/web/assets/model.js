// Runs the network in the browser with ONNX Runtime Web: on WebGPU if there is a GPU, else in WebAssembly.

import {crc32} from "./crc.js";

const MOST = 2 ** 26;  // bytes of logits to remember: many calls repeat earlier ones
const NETWORK = ["model.onnx", "weights.bin"];
const PATIENCE = 60;  // seconds to wait for a server that sends nothing
const UPLOAD = "put all files of one export on the server, then reload.";
let about, ort, session, known = new Map();

// Load a file of this page and return its bytes. If they are not those that export.py wrote, throw a sentence that
// says what is wrong and what to do.
async function load(name, report) {
  const [size, checksum] = about.files[name], bytes = new Uint8Array(size), stop = new AbortController();
  let found = 0, timer, answer;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => stop.abort(), 1000 * PATIENCE);
  };
  report(name, 0);
  try {
    wait();
    const place = about.network?.includes(name) ? "" : about.place;
    answer = await fetch(place + name, {cache: "no-cache", signal: stop.signal});  // not an older export's
    const reader = answer.body.getReader();
    for (let part; answer.ok && (part = (await reader.read()).value); wait()) {
      if (found + part.length <= size) bytes.set(part, found);
      found += part.length;
      report(name, found);
    }
  } catch {
    const sent = found ? `broke off after ${found} of ${size} bytes` : "cannot be loaded: no answer, or something blocks it";
    const why = stop.signal.aborted ? `does not come: the server sent nothing for ${PATIENCE} s` : sent;
    throw `${name} ${why}; check the connection and the server, then reload.`;
  } finally {
    clearTimeout(timer);
  }
  if (answer.status === 404) throw `${name} is missing (404): ${UPLOAD}`;
  if (!answer.ok) throw `The server does not give ${name} (${answer.status}): ${UPLOAD}`;
  if (found !== size)
    throw `${name} has ${found} bytes, ${size} were written: it is cut off, or of another export; ${UPLOAD}`;
  if (crc32(bytes) !== checksum)
    throw `${name} has the right length, but a wrong checksum: it is damaged, or of another export; ${UPLOAD}`;
  const type = answer.headers.get("content-type") || "a file without a type";
  if (name.endsWith(".mjs") && !type.includes("javascript"))
    throw `${name} comes as ${type}, which no browser runs: let the server send .mjs as text/javascript, then reload.`;
  return bytes;
}

// Convert weights.bin to the float32 data that the graph expects. Its tensors are in float32, or in int8 followed by a
// scale for each column.
function unpack(packed) {
  const weights = new Float32Array(about.bytes / 4);
  let at = 0;
  const floats = n => new Float32Array(packed.slice(at, at += 4 * n));
  for (const [offset, n, columns] of about.tensors) {
    if (!columns) {
      weights.set(floats(n), offset / 4);
      continue;
    }
    const values = new Int8Array(packed, at, n);
    at += n;
    const scale = floats(columns);
    values.forEach((value, i) => weights[offset / 4 + i] = value * scale[i % columns]);
  }
  return new Uint8Array(weights.buffer);
}

// Start ONNX Runtime on a device. `coming`: a promise of the bytes of the graph and the weights.
async function start(device, coming, report) {
  const files = about.runtime[device];  // the script, the module that it imports, the WebAssembly binary
  const [[graph, packed], [, , binary]] =
    await Promise.all([coming, Promise.all(files.map(name => load(name, report)))]);
  ort = await import(about.place + files[0]);
  ort.env.wasm.wasmPaths = about.place;
  ort.env.wasm.wasmBinary = binary.buffer;
  const externalData = [{path: "model.onnx.data", data: unpack(packed.buffer)}];
  session = await ort.InferenceSession.create(graph, {executionProviders: [device], externalData});
  await predict([[]]);
}

// Load the model and return the name of what it runs on. Throws a sentence for the user on failure.
// described: what export.py wrote into the page, and `place`, its URL; `network`: the URLs of the graph and the weights,
// if these are elsewhere. wanted: "webgpu", "wasm" or null.
// tell(loaded, total): called with numbers of bytes as they arrive.
export async function open(described, wanted, tell = () => {}) {
  about = described;
  const gpu = wanted !== "wasm" && await navigator.gpu?.requestAdapter().catch(() => null);
  const slow = gpu?.info?.isFallbackAdapter && wanted !== "webgpu";  // an emulated GPU is slower than WebAssembly
  const loaded = new Map(), add = numbers => [...numbers].reduce((a, b) => a + b, 0);
  const report = (name, bytes) => {
    loaded.set(name, bytes);
    tell(add(loaded.values()), add([...loaded.keys()].map(name => about.files[name][0])));
  };
  const coming = Promise.all((about.network ?? NETWORK).map(name => load(name, report)));
  let failed;
  for (const device of gpu && !slow ? ["webgpu", "wasm"] : ["wasm"]) {
    try {
      await start(device, coming, report);
      return {webgpu: "WebGPU", wasm: "WebAssembly"}[device];
    } catch (error) {
      console.info(device, error);
      failed = error;
    }
  }
  if (typeof failed === "string") throw failed;
  throw `The model does not start (${String(failed).slice(0, 200)}); it takes Chrome 111, Firefox 114, Safari 16.4 or newer.`;
}

// Return the logits (L * V) of each row of ids. As in training, rows are padded with [MASK] to the context L.
export async function predict(rows) {
  const {mask, context} = about, keys = rows.map(row => row.join());
  if (4 * context * mask * (known.size + rows.length) > MOST) known = new Map();
  for (const [i, key] of keys.entries()) {
    if (known.has(key)) continue;
    await new Promise(resolve => setTimeout(resolve));  // let the worker receive a newer request
    const ids = new Int32Array(context).fill(mask);
    ids.set(rows[i]);
    const {logits} = await session.run({ids: new ort.Tensor("int32", ids, [1, context])});
    known.set(key, logits.data);
  }
  return keys.map(key => known.get(key));
}
