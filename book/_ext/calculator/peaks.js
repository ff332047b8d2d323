// The step peak of every schedule in closed form, bytes above the inputs: flce_ref/schedules/peak.py and plan.py in
// JavaScript, for input, weight and logits of one dtype of `bytes` per element, and both gradients wanted.
// tests/test_calculator.py holds it to flce_ref.explain, to the byte, and to the memory simulator.
const FlcePeaks = (() => {
  const ceilDiv = (a, b) => Math.ceil(a / b);

  // The default rules: about D tokens a chunk, and about 2 D words a tile or as many as take a sixteenth of dw; at least
  // 1024, in equal multiples of 128.
  function equalPieces(total, largest) {
    if (total <= 1) return Math.max(1, total);
    const equal = ceilDiv(total, ceilDiv(total, largest));
    return Math.min(total, ceilDiv(equal, 128) * 128);
  }
  const defaultChunk = (n, d) => equalPieces(n, Math.max(1024, d));
  const defaultTile = (n, v, d) => equalPieces(v, Math.max(1024, 2 * d, Math.floor((v * d) / (16 * Math.max(1, n)))));

  function plain({ n, d, v, bytes }, chunkSize, checkpointed) {
    const [dx, dw] = [n * d * bytes, v * d * bytes];
    const nChunks = ceilDiv(n, chunkSize);
    const chunk = Math.min(chunkSize, n) * v * bytes;
    const everything = checkpointed ? 0 : n * v * bytes;
    const dxOfChunk = Math.floor(dx / nChunks);
    const oneLoss = Math.max(everything, chunk) + 2 * chunk;
    if (nChunks <= 1) return Math.max(oneLoss, chunk + dx + dw);
    let secondLoss = Math.max(everything - chunk, chunk) + 2 * chunk + dw + dxOfChunk;
    if (checkpointed) secondLoss += dx - 2 * dxOfChunk;
    const summed = Math.max(0, everything - 2 * chunk) + 3 * dw + 2 * dxOfChunk;
    return Math.max(oneLoss, secondLoss, summed, dw + 2 * dx);
  }

  function fused({ n, d, v, bytes }, chunkSize, accumBytes) {
    const buffer = Math.min(chunkSize, n) * v * bytes;
    const result = accumBytes === bytes ? 0 : v * d * bytes; // otherwise scaled in place
    return n * d * bytes + v * d * accumBytes + Math.max(buffer, result);
  }

  function tiled({ n, d, v, bytes }, width) {
    const buffer = n * Math.min(width, v) * bytes;
    const sumOfDx = n * d * 4;
    const result = bytes === 4 ? 0 : n * d * bytes;
    return v * d * bytes + sumOfDx + Math.max(buffer, result);
  }

  // Every schedule's row for a head; `chunk`, tokens or words of a tile, is 0 for the default rule.
  function all(head, chunk) {
    const rows = Math.min(chunk || defaultChunk(head.n, head.d), head.n);
    const width = Math.min(chunk || defaultTile(head.n, head.v, head.d), head.v);
    const pieces = (size, of, what) => `${ceilDiv(of, size).toLocaleString("en")} ${what} of ${size.toLocaleString("en")}`;
    const chunks = `${pieces(rows, head.n, "chunks")} tokens`;
    const found = [
      { id: "naive", name: "naive", note: "all logits at once", peak: plain(head, head.n, false) },
      { id: "chunked", name: "chunked", note: chunks, peak: plain(head, rows, false) },
      { id: "checkpointed", name: "checkpointed", note: chunks, peak: plain(head, rows, true) },
      { id: "fused", name: "fused, dw summed in float32", note: chunks, peak: fused(head, rows, 4) },
      { id: "fused-bf16", name: "fused, dw summed in bfloat16", note: chunks, peak: fused(head, rows, 2) },
      { id: "vocab_tiled", name: "vocab_tiled", note: `${pieces(width, head.v, "tiles")} words`, peak: tiled(head, width) },
    ];
    // The library sums in the dtype of the products or in a wider one, and never in float16.
    return found.filter((row) => row.id !== "fused-bf16" || head.dtype === "bfloat16");
  }

  // input and weight, and a target of 8 bytes a token.
  const inputs = ({ n, d, v, bytes }) => (n * d + v * d) * bytes + 8 * n;

  // The most tokens with which the inputs and the peak of the schedule `id` together are at most `budget` bytes.
  function longest(head, chunk, id, budget) {
    const fits = (n) => {
      const one = { ...head, n };
      return inputs(one) + all(one, chunk).find((row) => row.id === id).peak <= budget;
    };
    if (!fits(1)) return 0;
    let [low, high] = [1, 2];
    while (fits(high)) [low, high] = [high, 2 * high];
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      if (fits(middle)) low = middle;
      else high = middle;
    }
    return low;
  }

  return { all, inputs, longest };
})();
