// The sampler of sample.py with its defaults: it reveals tokens that are far apart, then draws tokens of low confidence
// again. Equal seeds give the same text as in Python, up to rounding in the network's logits.
//
// The network is a function predict(rows). It takes arrays of ids, with `mask` at hidden tokens, and returns the logits
// of each as a Float32Array (L * V).

const AGE = .3, DISTANCE = 3;  // as in sample.py

// Return T random 32-bit words by Philox-4x32-10 (Salmon et al., SC'11), the same as philox_words in
// kernels/reference.py.
export function words(seed, step, sample, T) {
  const found = [], low = n => Number(n & 0xffffffffn), high = n => Number(n >> 32n);
  for (let block = 0; 4 * block < T; block++) {
    let c = [sample >>> 0, block, 0, 0], k0 = seed >>> 0, k1 = step >>> 0;
    for (let round = 0; round < 10; round++) {
      const p0 = BigInt(c[0]) * 0xd2511f53n, p2 = BigInt(c[2]) * 0xcd9e8d57n;
      c = [(high(p2) ^ c[1] ^ k0) >>> 0, low(p2), (high(p0) ^ c[3] ^ k1) >>> 0, low(p0)];
      k0 = (k0 + 0x9e3779b9) >>> 0;
      k1 = (k1 + 0xbb67ae85) >>> 0;
    }
    found.push(...c);
  }
  return found.slice(0, T);
}

// Return T random numbers in [0, 1), with 53 bits to draw tokens and 32 bits to order positions.
export function uniform(seed, step, sample, T, purpose) {
  if (purpose !== "token") return words(seed, 4 * step + {noise: 2, row: 3}[purpose], sample, T).map(w => w / 2 ** 32);
  const low = words(seed, 4 * step + 1, sample, T);
  return words(seed, 4 * step, sample, T).map((w, i) => (w * 2 ** 21 + (low[i] >>> 11)) / 2 ** 53);
}

const reversedBits = i => parseInt([...i.toString(2).padStart(16, "0")].reverse().join(""), 2);

// Return the log-probabilities of a position, rounded to float32 as in PyTorch.
export function logSoftmax(logits) {
  const top = logits.reduce((a, b) => Math.max(a, b));
  const below = logits.map(v => v - top);
  const total = Math.fround(Math.log(below.reduce((sum, v) => sum + Math.exp(v), 0)));
  return below.map(v => v - total);
}

// Draw a token: the first at which the cumulative distribution exceeds u. Temperature 0 gives the likeliest.
export function drawToken(logp, u, temperature) {
  const top = logp.reduce((a, b) => Math.max(a, b));
  let total = 0;
  const cdf = Array.from(logp, v => total += Math.exp((v - top) / Math.max(temperature, 1e-30)));
  return cdf.findIndex(sum => sum > u * total);
}

const usualCorrections = steps => Math.max(0, steps - Math.min(Math.max(steps >> 1, 4), 16));

// Plan how the gaps of a text are filled: the order of positions, and the numbers of steps that reveal tokens
// (`reveals`) and that draw tokens again (`corrections`).
// matches: gaps that must match, [{start, length, next, accepts}] with an automaton of pattern.js.
// correct: how many of the steps draw tokens again, at most.
export function plan(ids, sample, mask, {seed, steps, matches = [], correct = usualCorrections(steps)}) {
  const gaps = [...ids.keys()].filter(i => ids[i] === mask), n = gaps.length;
  const corrections = n > 1 ? Math.min(3 * n, correct) : 0;
  const reveals = Math.max(1, Math.min(steps - corrections, n));
  const first = Math.floor(uniform(seed, 0, sample, 1, "row")[0] * 2 ** 16);
  const turn = new Map(gaps.map((i, k) => [i, reversedBits((k + first) % 2 ** 16)]));
  return {sample, gaps, turn, reveals, corrections, matches, ids: [...ids], doubt: ids.map(() => 0)};
}

// Return the positions that step s draws: at first the next masked ones in order, later the filled ones of lowest
// confidence among all within DISTANCE.
function choose(row, s, mask, noise) {
  const masked = row.gaps.filter(i => row.ids[i] === mask), c = s - row.reveals;
  const left = (Math.max(row.reveals - s, 1) - 1) / row.reveals;  // the fraction of gaps that stays masked
  const k = masked.length - Math.floor(row.gaps.length * left + 1e-9);
  if (k > 0) return masked.sort((a, b) => row.turn.get(a) - row.turn.get(b) || noise[a] - noise[b]).slice(0, k);
  if (c < 0 || c >= row.corrections) return [];
  const doubt = i => row.doubt[i] + 1e-9 * noise[i];
  const rivals = i => row.gaps.filter(j => Math.abs(i - j) < DISTANCE && row.ids[j] !== mask);
  return row.gaps.filter(i => row.ids[i] !== mask && rivals(i).every(j => doubt(j) <= doubt(i)));
}

function logSumExp(values) {
  const top = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return top === -Infinity ? top : top + Math.log(values.reduce((sum, v) => sum + Math.exp(v - top), 0));
}

// Draw a gap that must match from the product of the marginals at its masks, given a match, as drawing.py does: what
// follows a state is weighed from the right, then drawn from the left. Returns a Map from position to the logits of the
// tokens there, given what was drawn before. seen: a text with `mask` where tokens are drawn; logits: all of the text's.
function constrain({start, length, next, accepts}, seen, logits, mask, u, temperature) {
  const S = accepts.length, at = i => logits.subarray((start + i) * mask, (start + i + 1) * mask);
  const to = (q, v) => next[q * mask + v];
  const ahead = [Float64Array.from(accepts, a => a ? 0 : -Infinity)];  // log-weights of the states, 0, 1 ... tokens before the end
  for (let n = 1; n <= length; n++) {
    const id = seen[start + length - n], later = ahead[n - 1], p = at(length - n), total = logSumExp(p);
    const of = q => {
      const weight = v => to(q, v) < 0 ? -Infinity : later[to(q, v)];
      return id === mask ? logSumExp(Float64Array.from(p, (logit, v) => logit - total + weight(v))) : weight(id);
    };
    const b = Float64Array.from({length: S}, (_, q) => of(q)), top = Math.max(...b);
    ahead.push(b.map(w => w - top));
  }
  const found = new Map();
  for (let i = 0, q = 0; i < length; i++) {
    let id = seen[start + i];
    if (id === mask) {
      const later = ahead[length - i - 1];
      const wanted = Float64Array.from(at(i), (logit, v) => to(q, v) < 0 ? -Infinity : logit + later[to(q, v)]);
      id = drawToken(wanted, u[start + i], temperature);
      found.set(start + i, {id, wanted});
    }
    q = to(q, id);
  }
  return found;
}

// What is shown of a token: its position, itself, its probability, the five likeliest [token, probability].
function asDrawn(i, token, logp) {
  const likeliest = [...logp.keys()].sort((a, b) => logp[b] - logp[a]).slice(0, 5), p = v => Math.exp(logp[v]);
  return [i, token, p(token), likeliest.map(v => [v, p(v)])];
}

// Fill the gaps of rows, which `plan` returned, in place. After each network call, yields a list for each row of what
// was drawn, as from `asDrawn`.
export async function* unmask(predict, rows, mask, {seed, temperature}) {
  for (let s = 0; s < Math.max(...rows.map(row => row.reveals + row.corrections)); s++) {
    const random = purpose => rows.map(row => uniform(seed, s, row.sample, row.ids.length, purpose));
    const noise = random("noise"), u = random("token");
    const drawn = rows.map((row, r) => choose(row, s, mask, noise[r]).sort((a, b) => a - b));
    const seen = rows.map((row, r) => row.ids.map((id, i) => drawn[r].includes(i) ? mask : id));
    if (!drawn.some(all => all.length)) continue;
    const found = await predict(seen.filter((_, r) => drawn[r].length));
    const logits = drawn.map(all => all.length ? found.shift() : null);
    yield rows.map((row, r) => {
      row.doubt = row.doubt.map(doubt => doubt + AGE);
      const isHere = ({start, length}) => drawn[r].some(i => i >= start && i < start + length);
      const bound = row.matches.filter(isHere).map(match => constrain(match, seen[r], logits[r], mask, u[r], temperature));
      const given = new Map(bound.flatMap(tokens => [...tokens]));
      return drawn[r].map(i => {
        const own = logits[r].subarray(i * mask, (i + 1) * mask);  // the id of [MASK] equals V
        const logp = logSoftmax(given.get(i)?.wanted ?? own);
        const token = given.get(i)?.id ?? drawToken(logp, u[r][i], temperature);
        row.ids[i] = token;
        row.doubt[i] = -logp[token];
        return asDrawn(i, token, logp);
      });
    });
  }
}
