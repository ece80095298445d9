// Generates text with an AOTInductor package whose state is a bounded cache, without Python, and compares it with what is
// expected.
//
//   run_generation <libdmattn_ops.so> <folder written by export_generation.py>
//
// A run of the package takes one byte of every sequence in. It keeps what it has read itself, in memory of one size.
#include <string>

#include "package.h"

// prompts int64 [B, P] -> answers int64 [B, count], and the logits [B, 256] after the last byte but one, whose best is the last.
std::pair<at::Tensor, at::Tensor> generate(torch::inductor::AOTIModelPackageLoader& model, const at::Tensor& prompts,
                                           int64_t count) {
  std::vector<at::Tensor> answers;
  at::Tensor logits, fresh = at::ones({prompts.size(0)}, at::kBool);
  for (int64_t position = 0; position < prompts.size(1) + count - 1; ++position) {
    const bool reads = position < prompts.size(1);
    std::vector<at::Tensor> inputs{reads ? prompts.narrow(1, position, 1).contiguous() : answers.back(), fresh};
    logits = model.run(inputs).at(0);
    if (position >= prompts.size(1) - 1) answers.push_back(logits.argmax(-1, /*keepdim=*/true));
    fresh = at::zeros_like(fresh);  // the first byte alone begins a sequence
  }
  return {at::cat(answers, 1), logits};
}

int run(const std::filesystem::path& folder) {
  torch::inductor::AOTIModelPackageLoader model(folder / "step.pt2");
  const std::vector<at::Tensor> saved = read_tensors(folder / "prompts.pt");
  const at::Tensor prompts = saved.at(0), expected = saved.at(1), expected_logits = saved.at(2);
  bool agrees = true;
  for (const char* turn : {"first", "again"}) {  // again: what was generated before is forgotten
    const auto [answers, logits] = generate(model, prompts, expected.size(1));
    const bool same = at::equal(answers, expected) && at::allclose(logits, expected_logits, /*rtol=*/1e-4, /*atol=*/1e-5);
    agrees = agrees && same;
    std::cout << turn << ": " << answers.size(1) << " bytes of each sequence" << (same ? " agree" : " DIFFER")
              << ", largest difference of logits " << (logits - expected_logits).abs().max().item<float>() << "\n";
  }
  for (int64_t row = 0; row < prompts.size(0); ++row) {
    std::string text;
    const at::Tensor bytes = at::cat({prompts[row], expected[row]});
    for (int64_t at = 0; at < bytes.size(0); ++at) {
      const int64_t byte = bytes[at].item<int64_t>();
      text += byte >= 32 && byte < 127 ? static_cast<char>(byte) : '.';
    }
    std::cout << "  " << text << "\n";
  }
  return agrees ? 0 : 1;
}

int main(int count, char** arguments) { return run_with_arguments(count, arguments, run); }
