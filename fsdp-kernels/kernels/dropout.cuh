// Dropout with the masks of fsdp-models/src/ops/dropout.rs: the same bits.

namespace fsdp {

struct DropoutArgs {
    const void* x;  // [samples, width]
    void* y;        // may be x
    u64 samples;
    u64 width;
    u64 key;
    u64 first_sample;
    u32 threshold;  // words below it drop their element
    f32 scale;      // of the others
};

FSDP_DEVICE u64 splitmix(u64 seed, u64 step) {
    u64 z = seed + step * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

FSDP_DEVICE u32 rotated(u32 value, int by) { return value << by | value >> (32 - by); }

FSDP_DEVICE void quarter_round(u32& a, u32& b, u32& c, u32& d) {
    a += b;
    d = rotated(d ^ a, 16);
    c += d;
    b = rotated(b ^ c, 12);
    a += b;
    d = rotated(d ^ a, 8);
    c += d;
    b = rotated(b ^ c, 7);
}

constexpr u64 CHACHA_WORDS = 16;

// Block `block` of ChaCha with 8 rounds, of the stream of a sample.
FSDP_DEVICE void chacha8(u64 key, u64 sample, u64 block, u32 (&words)[CHACHA_WORDS]) {
    const u64 keys[4] = {splitmix(key, 1), splitmix(key, 2), splitmix(sample, 1), splitmix(sample, 2)};
    u32 start[CHACHA_WORDS] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
    FSDP_UNROLL
    for (int k = 0; k < 4; ++k) {
        start[4 + 2 * k] = static_cast<u32>(keys[k]);
        start[5 + 2 * k] = static_cast<u32>(keys[k] >> 32);
    }
    start[12] = static_cast<u32>(block);
    start[13] = static_cast<u32>(block >> 32);
    FSDP_UNROLL
    for (int k = 0; k < static_cast<int>(CHACHA_WORDS); ++k) words[k] = start[k];
    FSDP_UNROLL
    for (int round = 0; round < 4; ++round) {
        FSDP_UNROLL
        for (int k = 0; k < 4; ++k) quarter_round(words[k], words[4 + k], words[8 + k], words[12 + k]);
        FSDP_UNROLL
        for (int k = 0; k < 4; ++k) {
            quarter_round(words[k], words[4 + (k + 1) % 4], words[8 + (k + 2) % 4], words[12 + (k + 3) % 4]);
        }
    }
    FSDP_UNROLL
    for (int k = 0; k < static_cast<int>(CHACHA_WORDS); ++k) words[k] += start[k];
}

// y = x * scale, or 0 where the element's word is below the threshold.
template <class T>
FSDP_DEVICE void dropout(const DropoutArgs& a) {
    const T* x = static_cast<const T*>(a.x);
    T* y = static_cast<T*>(a.y);
    const u64 blocks = (a.width + CHACHA_WORDS - 1) / CHACHA_WORDS;
    const bool aligned = a.width % PACK == 0 && packs(x) && packs(y);
    for_each(a.samples * blocks, false, [&](auto, u64 turn) {
        const u64 sample = turn / blocks, block = turn % blocks;
        u32 words[CHACHA_WORDS];
        chacha8(a.key, a.first_sample + sample, block, words);
        const u64 begin = sample * a.width + block * CHACHA_WORDS;
        const u64 rest = a.width - block * CHACHA_WORDS;
        FSDP_UNROLL
        for (int k = 0; k < static_cast<int>(CHACHA_WORDS); k += PACK) {
            const u64 skipped = static_cast<u64>(k);
            const u64 count = rest <= skipped ? 0 : rest - skipped < PACK ? rest - skipped : PACK;
            const bool packed = aligned && count == PACK;
            f32 value[PACK] = {};
            load_up_to(x + begin + k, count, packed, value);
            FSDP_UNROLL
            for (int j = 0; j < PACK; ++j) value[j] = words[k + j] < a.threshold ? 0.0f : value[j] * a.scale;
            store_up_to(y + begin + k, count, packed, value);
        }
    });
}

FSDP_KERNEL(fsdp_dropout_f32, DropoutArgs, dropout<f32>);
FSDP_KERNEL(fsdp_dropout_bf16, DropoutArgs, dropout<bf16>);
FSDP_KERNEL(fsdp_dropout_f16, DropoutArgs, dropout<f16>);

}  // namespace fsdp
