// Numbers and foreign texts for people.

// Control and format characters (bidirectional marks among them) would turn or hide what follows: show their numbers.
const safe = (text) =>
  String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

// Bytes with three digits in decimal units, as disks and networks count.
function bytesText(n) {
  if (typeof n !== "number") return "–";
  let unit = 0;
  let value = n;
  while (Math.abs(value) >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return (unit ? value.toPrecision(3) : String(value)) + " " + UNITS[unit];
}

// Made once: `toLocaleString` makes one at each call.
const COUNT = new Intl.NumberFormat("en-US");
const whole = (n) => (n === null || n === undefined ? "–" : COUNT.format(n));

// A measured number with six digits.
function number(x) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return safe(x);
  if (!Number.isFinite(x)) return String(x);
  if (Number.isInteger(x)) return whole(x);
  const size = Math.abs(x);
  return size >= 1e6 || size < 1e-4 ? x.toExponential(4) : String(Number(x.toPrecision(6)));
}

// Seconds since 1970, in UTC; a run may tell anything.
const clockText = (s) => (typeof s === "number" && Math.abs(s) < 1e11 ? new Date(s * 1000).toISOString().slice(0, 19) + "Z" : "–");

const percent = (x) => (100 * x).toFixed(1) + " %";
const seconds = (s) => (typeof s !== "number" ? "–" : s < 1 ? (s * 1000).toPrecision(3) + " ms" : Number(s.toPrecision(4)) + " s");

// Ranks or layers: 0–3, 8.
function spans(numbers) {
  const out = [];
  for (const n of numbers) {
    const last = out[out.length - 1];
    if (last && last[1] === n - 1) last[1] = n;
    else out.push([n, n]);
  }
  return out.map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`)).join(", ");
}

// The last index below n for which something holds, where it holds for all before that; 0 if for none.
function lastWhere(n, holds) {
  let low = 0;
  let high = n - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (holds(middle)) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Little-endian numbers from base64; the plain loop is for browsers without `fromBase64`.
function decode(text, wide) {
  let raw;
  if (Uint8Array.fromBase64) {
    raw = Uint8Array.fromBase64(text);
  } else {
    const binary = atob(text);
    raw = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i += 1) raw[i] = binary.charCodeAt(i);
  }
  return wide ? new Float64Array(raw.buffer) : new Float32Array(raw.buffer);
}
