// CRC-32, equal to zlib.crc32 in Python. Not SHA-256: browsers offer crypto.subtle only over https.
const TABLE = Int32Array.from({length: 256}, (_, value) => {
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? value >>> 1 ^ 0xedb88320 : value >>> 1;
  return value;
});

export function crc32(bytes) {
  let crc = -1;
  for (let i = 0; i < bytes.length; i++) crc = crc >>> 8 ^ TABLE[(crc ^ bytes[i]) & 255];
  return ~crc >>> 0;
}
