// Runs every kernel of one source on fixed inputs and prints its results, a line a result: its name and its numbers.
// Built by test_aarch64.py for two processors, with the macros of that source and
//   SOURCE    decode.cpp or train.cpp, in quotation marks
//   DECODE    1 for decode.cpp, 0 for train.cpp

#include SOURCE

#include <cstdio>
#include <string>

namespace {

constexpr int THREADS = 2;

// Numbers in [-1, 1), rounded to T, the same on every processor.
std::vector<T> numbers(int64_t count) {
    static uint32_t state = 1;
    std::vector<T> out(count);
    for (auto& x : out) {
        state = state * 1664525u + 1013904223u;
        narrowed(float(int32_t(state >> 8) - (1 << 23)) / float(1 << 23), &x);
    }
    return out;
}

void print(const char* name, const std::vector<T>& numbers) {
    std::printf("%s", name);
    for (T x : numbers) std::printf(" %.9g", double(widened(x)));
    std::printf("\n");
}

template <typename Number>
void print_plain(const char* name, const std::vector<Number>& numbers) {
    std::printf("%s", name);
    for (Number x : numbers) std::printf(" %.9g", double(x));
    std::printf("\n");
}

#if DECODE

struct Weight {
    std::vector<T> packed, bias;
    Matrix matrix;

    Weight(int64_t out, int64_t in) : packed(packed_size(out, in)), bias(numbers(out)) {
        const auto weight = numbers(out * in);
        pack(weight.data(), out, in, packed.data(), THREADS);
        matrix = {packed.data(), bias.data(), out, in};
    }
};

void attention() {
    const int64_t rows = 3, heads = 2, columns = 40, lengths[] = {0, 17, 39};
    for (int64_t window : {0, 5}) {
        const auto query = numbers(rows * heads * G * D), key = numbers(rows * heads * D), value = key;
        auto keys = numbers((rows * heads * columns + columns) * D), values = keys;
        std::vector<T> out(query.size());
        decode_attention(query.data(), key.data(), value.data(), keys.data(), values.data(), out.data(), lengths, rows,
                         heads, columns, window, 0.3f, THREADS);
        print(window ? "windowed_attention" : "attention", out);
    }
}

void draws() {
    const int64_t count = 1000, row[] = {0, 0, 1, 2, 2};
    const float temperature[] = {1, 0.5, 0.25, 1, 1};
    const double uniform[] = {0.1, 0.9, 0.5, -1, 0.999};
    const auto logits = numbers(3 * count);
    std::vector<int64_t> token(5);
    std::vector<double> logp(5);
    draw_tokens(logits.data(), count, row, 5, temperature, uniform, token.data(), logp.data(), THREADS);
    print_plain("token", token);
    print_plain("token_logp", logp);
}

void products() {
    for (int64_t rows : {1, 7, 40}) {
        const Weight weight(100, 70);
        const auto x = numbers(rows * 70);
        std::vector<T> y(rows * 100);
        linear(&weight.matrix, x.data(), y.data(), rows, THREADS);
        print(("linear_" + std::to_string(rows)).c_str(), y);
    }
}

void layers() {
    const int64_t rows = 5, heads = 2, hidden = 48, inner = 80, columns = 20, lengths[] = {0, 3, 7, 12, 19};
    std::vector<T> cache[4];
    for (auto& each : cache) each = numbers((rows + 1) * heads * columns * D);
    std::vector<std::unique_ptr<Weight>> weights;
    const auto weight = [&](int64_t out, int64_t in) {
        weights.push_back(std::make_unique<Weight>(out, in));
        return weights.back()->matrix;
    };
    const auto wide = numbers(hidden), narrow = numbers(D);
    std::vector<Layer> layers;
    for (int n = 0; n < 2; ++n) {
        const Norm norm{wide.data(), 1e-5f}, head{n ? narrow.data() : nullptr, 1e-5f};
        layers.push_back({norm, head, head, norm, weight(heads * G * D, hidden), weight(heads * D, hidden),
                          weight(heads * D, hidden), weight(hidden, heads * G * D), weight(inner, hidden),
                          weight(inner, hidden), weight(hidden, inner), cache[2 * n].data(), cache[2 * n + 1].data(),
                          n ? 4 : 0, 0.2f});
    }
    const auto cosine = numbers(rows * D), sine = numbers(rows * D);
    auto x = numbers(rows * hidden);
    decode_layers(layers.data(), 2, cosine.data(), sine.data(), lengths, nullptr, x.data(), rows, heads, columns,
                  THREADS);
    print("layers", x);
}

void run() {
    attention();
    draws();
    if (packed_size(8, 8) == 0) return;  // this processor has no such products
    products();
    layers();
}

#else

void attention() {
    const int64_t tokens = 70, query_heads = 4, shared = 2, keys = query_heads / shared, D = 32;
    const Group groups[] = {{0, 40, 0, -1}, {40, 30, 10, -1}};  // the second sees ten tokens of the first
    for (int64_t window : {0, 9}) {
        std::vector<T> query = numbers(tokens * query_heads * D), key = numbers(tokens * keys * D), value = key,
                       out(query.size()), grad = numbers(query.size()), query_grad(query.size()),
                       key_grad(key.size()), value_grad(key.size());
        std::vector<float> lse(query_heads * tokens);
        const auto heads = [&](std::vector<T>& x) { return Heads{x.data(), D, int64_t(x.size()) / tokens}; };
        const Task task{heads(query), heads(key), heads(value), groups, nullptr, 2, query_heads, shared, D, window,
                        0.2f};
        const Heads out_heads = heads(out), key_heads = heads(key_grad), value_heads = heads(value_grad);
        attention_forward(&task, &out_heads, lse.data(), tokens, THREADS);
        const Backward back{out_heads, heads(grad), heads(query_grad), lse.data()};
        attention_backward(&task, &back, &key_heads, &value_heads, tokens, THREADS);
        const std::string prefix = window ? "windowed_" : "";
        print((prefix + "attention").c_str(), out);
        print_plain((prefix + "lse").c_str(), lse);
        print((prefix + "query_grad").c_str(), query_grad);
        print((prefix + "key_grad").c_str(), key_grad);
        print((prefix + "value_grad").c_str(), value_grad);
    }
}

void picks() {
    const int64_t rows = 3, count = 1100, target[] = {0, 511, 1099};
    auto logits = numbers(rows * count);
    std::vector<float> logp(rows), entropy(rows), highest(rows), total(rows);
    const float d_logp[] = {1, -2, 0.5}, d_entropy[] = {0, 0.1f, -1};
    pick_forward(logits.data(), rows, count, target, 0.7f, logp.data(), entropy.data(), highest.data(), total.data(),
                 THREADS);
    pick_backward(logits.data(), rows, count, target, 0.7f, entropy.data(), highest.data(), total.data(), d_logp,
                  d_entropy, THREADS);
    print_plain("logp", logp);
    print_plain("entropy", entropy);
    print("pick_grad", logits);
}

void norms() {
    const int64_t rows = 40, count = 50;
    const auto x = numbers(rows * count), weight = numbers(count), grad = numbers(rows * count);
    std::vector<T> out(x.size()), x_grad(x.size()), weight_grad(count);
    std::vector<float> scale(rows);
    norm_forward(x.data(), weight.data(), rows, count, 1e-6f, out.data(), scale.data(), THREADS);
    norm_backward(x.data(), weight.data(), grad.data(), scale.data(), rows, count, x_grad.data(), weight_grad.data(),
                  THREADS);
    print("norm", out);
    print("norm_x_grad", x_grad);
    print("norm_weight_grad", weight_grad);
}

void gates() {
    const auto gate = numbers(333), up = numbers(333), grad = numbers(333);
    std::vector<T> out(333), gate_grad(333), up_grad(333);
    gate_forward(gate.data(), up.data(), 333, out.data(), THREADS);
    gate_backward(gate.data(), up.data(), grad.data(), 333, gate_grad.data(), up_grad.data(), THREADS);
    print("gate", out);
    print("gate_grad", gate_grad);
    print("up_grad", up_grad);
}

void rotations() {
    const auto x = numbers(5 * 3 * 24), cosine = numbers(5 * 24), sine = numbers(5 * 24);
    for (int64_t back : {0, 1}) {
        std::vector<T> out(x.size());
        rotate(x.data(), cosine.data(), sine.data(), 5, 3, 24, back, out.data(), THREADS);
        print(back ? "rotated_back" : "rotated", out);
    }
}

void masters() {
    std::vector<uint32_t> bits(300), joined(300);
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = uint32_t(i) * 2654435761u;
    std::vector<uint16_t> weight(300);
    std::vector<int16_t> rest(300);
    part(bits.data(), 300, weight.data(), rest.data(), THREADS);
    join(weight.data(), rest.data(), 300, joined.data(), THREADS);
    print_plain("weight", weight);
    print_plain("rest", rest);
    print_plain("joined", joined);
}

void run() {
    attention();
    picks();
    norms();
    gates();
    rotations();
    masters();
}

#endif

}  // namespace

int main() { run(); }
