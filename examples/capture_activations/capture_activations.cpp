// Looks into a forward pass and changes it: captures, an edit of an activation, a pass that stops early.
//
//   capture_activations MODEL
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/placing.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <iostream>

int main(int argc, char** argv) try {
  using namespace emend;
  if (argc < 2) return std::cerr << "usage: capture_activations MODEL\n", 2;
  const auto model = models::load_placed(argv[1]);
  at::NoGradGuard no_gradients;
  const auto batch = models::TokenBatch::from_rows(
      {model.tokenizer().encode_ids("The Eiffel Tower is in Paris"), model.tokenizer().encode_ids("A shorter row")});

  // Every layer's residual stream. Tensors are packed: the tokens of all rows one after the other, no padding.
  hooks::HookSession look(model.hooks());
  for (int layer = 0; layer < model.n_layers(); ++layer) look.capture({hooks::Site::kLayerOut, layer});
  look.attach();
  const auto plain = model.forward(batch).logits;
  for (int layer = 0; layer < model.n_layers(); ++layer) {
    const auto out_ND = look.captured({hooks::Site::kLayerOut, layer});
    std::cout << to_string(hooks::SiteRef{hooks::Site::kLayerOut, layer}) << " " << out_ND.sizes() << ", mean norm "
              << out_ND.norm(2, -1).mean().item<double>() << "\n";
  }
  look.finish();  // an error if a site did not fire

  // An ablation: one layer's MLP contributes nothing, for the last token of the first row alone.
  hooks::HookSession ablate(model.hooks());
  const int64_t token = batch.token(0, -1);
  ablate.edit({hooks::Site::kMlpOut, 1}, [&](const at::Tensor& out_ND) {
    auto changed = out_ND.clone();  // same shape, dtype and device
    changed[token].zero_();
    return changed;
  });
  ablate.attach();
  const auto ablated = model.forward(batch).logits;
  ablate.finish();
  const auto change_N = (ablated - plain).abs().amax(-1);
  std::cout << "changed logits of the token: " << change_N[token].item<double>()
            << ", of the other row: " << change_N[batch.token(1, -1)].item<double>() << "\n";

  // Only as far as needed: the pass ends behind the site.
  hooks::HookSession early(model.hooks());
  const hooks::SiteRef key{hooks::Site::kMlpDownIn, 0};
  early.capture(key, {.tokens = std::vector<int64_t>{token}}).stop_after(key).attach();
  std::cout << "stopped early: " << model.forward(batch).stopped << ", key " << early.captured(key).sizes() << "\n";
  early.finish();
  return 0;
} catch (const emend::Error& error) {
  std::cerr << error.what() << "\n";
  return emend::exit_code(error.error_class());
}
