// The network in the browser: ONNX Runtime Web, on WebGPU where there is a GPU, else in WebAssembly.

const MOST = 2 ** 26;  // bytes of logits to keep: many calls show the network what it saw before
const place = new URL("./", import.meta.url).href;
let about, ort, session, known = new Map();

async function load(name) {
  const answer = await fetch(place + name).catch(() => ({status: "no answer"}));
  if (!answer.ok) throw `${name} is missing (${answer.status}): put all files of this page on the server, then reload.`;
  return answer.arrayBuffer();
}

// The float32 weights that the ONNX file expects, from tensors in float32, or in int8 with a scale for each column.
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

// Load the model of `described` (what export.py wrote into the page); returns what it runs on. wanted: a device or null.
export async function open(described, wanted) {
  about = described;
  const [graph, packed] = await Promise.all(["model.onnx", "weights.bin"].map(load));
  const data = unpack(packed);
  const gpu = wanted !== "wasm" && await navigator.gpu?.requestAdapter().catch(() => null);
  const slow = gpu?.info?.isFallbackAdapter && wanted !== "webgpu";  // a GPU in software is slower than WebAssembly
  for (const device of gpu && !slow ? ["webgpu", "wasm"] : ["wasm"]) {
    try {
      ort = await import(`${place}ort.${device}.min.mjs`);
      ort.env.wasm.wasmPaths = place;
      const externalData = [{path: "model.onnx.data", data}];
      session = await ort.InferenceSession.create(graph, {executionProviders: [device], externalData});
      await predict([[]]);
      return {webgpu: "WebGPU", wasm: "WebAssembly"}[device];
    } catch (error) {
      console.info(device, error);
    }
  }
  throw "The model does not start: it takes Chrome 111, Firefox 114, Safari 16.4 or newer, and all files named ort.";
}

// Logits (L * V) of each row of ids, which [MASK] follows up to the context L, as in training.
export async function predict(rows) {
  const {mask, context} = about, keys = rows.map(row => row.join());
  if (4 * context * mask * (known.size + rows.length) > MOST) known = new Map();
  for (const [i, key] of keys.entries()) {
    if (known.has(key)) continue;
    await new Promise(resolve => setTimeout(resolve));  // lets a newer request in
    const ids = new Int32Array(context).fill(mask);
    ids.set(rows[i]);
    const {logits} = await session.run({ids: new ort.Tensor("int32", ids, [1, context])});
    known.set(key, logits.data);
  }
  return keys.map(key => known.get(key));
}
