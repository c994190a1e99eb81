// Keyed 128-bit hash of a token prefix, extended token by token and read at any boundary.
//
// The construction is SipHash-2-4 with 128-bit output: without the key nobody can choose two prompts that
// meet, so that neither a lucky nor a hostile tenant sees another's entries. Fields are framed by tag and
// length, hence no two (scope, tokens) pairs are the same byte string.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "mutants.h"

namespace parrot::scheduler {

struct HashKey {
    uint64_t low = 0;
    uint64_t high = 0;
};

struct Hash128 {
    uint64_t low = 0;
    uint64_t high = 0;
    bool operator==(const Hash128&) const = default;
};

// The isolation domain of text that the operator published, which prompts of every domain share.
inline constexpr int64_t kPublicDomain = 0;

// Prefixes match only within one scope: KV of another model or adapter is of no use, and another isolation
// domain must not learn what is there. The first `public_len` tokens of a prompt are published text and match
// those of every domain; what lies behind them matches only where both prompts say so of the same length.
struct PrefixScope {
    int64_t model = 0;
    int64_t adapter = 0;
    int64_t domain = kPublicDomain;
    int32_t public_len = 0;
    bool operator==(const PrefixScope&) const = default;

    // Of the published beginning; in the public domain there is nothing else.
    PrefixScope public_part() const { return {model, adapter, kPublicDomain, 0}; }
    bool has_seam() const { return public_len > 0 && domain != kPublicDomain; }
};

class PrefixHasher {
  public:
    PrefixHasher(const HashKey& key, const PrefixScope& scope) {
        state_ = {key.low ^ 0x736f6d6570736575ULL, key.high ^ 0x646f72616e646f6dULL ^ 0xee,
                  key.low ^ 0x6c7967656e657261ULL, key.high ^ 0x7465646279746573ULL};
        absorb_field(state_, kModelTag, scope.model);
        absorb_field(state_, kAdapterTag, scope.adapter);
        absorb_field(state_, kDomainTag, scope.domain);
    }

    void extend(std::span<const int32_t> tokens) {
        State state = state_;
        for (size_t i = 0; i < tokens.size();) {
            if (num_tokens_ % 3 == 0) i += extend_by_words(state, tokens.subspan(i));
            if (i < tokens.size()) extend_by_token(state, word_of(tokens[i++]));
        }
        state_ = state;
    }

    // A variable without a value yet stands where its tokens will be.
    void extend_variable(int64_t variable) { insert_field(state_, kVariableTag, variable); }

    // From here on the tokens belong to another domain.
    void enter_domain(int64_t domain) { insert_field(state_, kDomainTag, domain); }

    // Of everything so far; the hash can be extended further.
    Hash128 digest() const {
        State state = state_;
        end_run(state);
        state[2] ^= 0xee;
        const uint64_t low = squeeze(state);
        state[1] ^= 0xdd;
        return {low, squeeze(state)};
    }

  private:
    using State = std::array<uint64_t, 4>;
    // The top bit, which no word of token ids has, tells a frame from tokens.
    static constexpr uint64_t kModelTag = 0x81;
    static constexpr uint64_t kAdapterTag = 0x82;
    static constexpr uint64_t kDomainTag = 0x83;
    static constexpr uint64_t kTokensTag = 0x84;
    static constexpr uint64_t kVariableTag = 0x85;
    static constexpr uint64_t kLargeTokenTag = 0x86;

    static uint64_t frame(uint64_t tag, uint64_t length) { return tag << 56 | length; }

    // Three tokens share a word of 63 bits. Larger ids, which no vocabulary has, are fields by themselves.
    static constexpr int kTokenBits = 21;

    static uint64_t word_of(int32_t token) { return static_cast<uint32_t>(token); }

    // As many whole words of three small tokens as there are; returns the number of tokens.
    size_t extend_by_words(State& state, std::span<const int32_t> tokens) {
        size_t i = 0;
        for (; i + 3 <= tokens.size(); i += 3) {
            const uint64_t a = word_of(tokens[i]), b = word_of(tokens[i + 1]), c = word_of(tokens[i + 2]);
            if ((a | b | c) >> kTokenBits != 0) break;
            absorb(state, a | b << kTokenBits | c << 2 * kTokenBits);
        }
        num_tokens_ += i;
        return i;
    }

    void extend_by_token(State& state, uint64_t token) {
        if (token >> kTokenBits != 0) return insert_field(state, kLargeTokenTag, static_cast<int64_t>(token));
        pending_ |= token << num_tokens_ % 3 * kTokenBits;
        if (++num_tokens_ % 3 != 0) return;
        absorb(state, pending_);
        pending_ = 0;
    }

    // Ends a run of tokens; what follows is another one.
    void insert_field(State& state, uint64_t tag, int64_t value) {
        end_run(state);
        absorb_field(state, tag, value);
        pending_ = 0;
        num_tokens_ = 0;
    }

    void end_run(State& state) const {
        const bool is_cut = num_tokens_ % 3 != 0;
        if (is_cut && !mutant("hash_ignores_last_token")) absorb(state, pending_);
        absorb(state, frame(kTokensTag, num_tokens_));
    }

    static void absorb_field(State& state, uint64_t tag, int64_t value) {
        absorb(state, frame(tag, sizeof(value)));
        absorb(state, static_cast<uint64_t>(value));
    }

    static void round(State& v) {
        v[0] += v[1];
        v[2] += v[3];
        v[1] = std::rotl(v[1], 13) ^ v[0];
        v[3] = std::rotl(v[3], 16) ^ v[2];
        v[0] = std::rotl(v[0], 32);
        v[2] += v[1];
        v[0] += v[3];
        v[1] = std::rotl(v[1], 17) ^ v[2];
        v[3] = std::rotl(v[3], 21) ^ v[0];
        v[2] = std::rotl(v[2], 32);
    }

    static void absorb(State& v, uint64_t word) {
        v[3] ^= word;
        round(v);
        round(v);
        v[0] ^= word;
    }

    static uint64_t squeeze(State& v) {
        for (int i = 0; i < 4; ++i) round(v);
        return v[0] ^ v[1] ^ v[2] ^ v[3];
    }

    State state_;
    uint64_t pending_ = 0;     // the even token of an unfinished pair
    uint64_t num_tokens_ = 0;  // of this run
};

}  // namespace parrot::scheduler
