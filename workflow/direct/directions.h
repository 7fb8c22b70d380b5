// Directions of behaviour: what tells two sets of prompts apart in the residual stream, layer by layer.
//
//   auto d = workflow::fit_directions(model, workflow::read_prompts("rude.txt"), workflow::read_prompts("kind.txt"));
//   auto steering = models::attach_steering(model, d.control_vector(), {.strength = 0.5});  // while generating
//   auto pack = workflow::ablate_directions(model, {&d, 1}, {});                // or in the weights (change.h)
//
// Goals: three published estimates with one scale (the vector's length is the distance of both sets' means along it),
// and figures from prompts that the estimate has not seen. Non-goals: sites inside a block.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/models/control_vector.h>
#include <emend/models/model.h>
#include <emend/workflow/handles.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace emend::workflow {

/// What a model is given: a user's message with an optional system message and the beginning of a reply.
struct ContrastPrompt {
  std::string prompt, system = {}, reply = {};
};
/// One a line: a text, or an object {"prompt": "…", "system": "…", "reply": "…"} of which only the first must be there.
/// Throws Error(kCorruption) naming file and line, Error(kInvalidArgument) for a file without prompts.
[[nodiscard]] std::vector<ContrastPrompt> read_prompts(const std::filesystem::path& path);
/// Each prompt as one text, through the model's chat template where it has one and `chat` is set. Throws
/// Error(kUnsupported) for a template that cannot be parsed.
[[nodiscard]] std::vector<std::string> prompt_texts(const models::Model& model, std::span<const ContrastPrompt> prompts,
                                                    bool chat);
/// Their token ids.
[[nodiscard]] std::vector<std::vector<int64_t>> prompt_rows(const models::Model& model,
                                                            std::span<const ContrastPrompt> prompts, bool chat);

/// Calls `pass` with the rows in batches of a few thousand tokens, in order; the first token of each stands at `begin`.
/// Throws Error(kCancelled).
void in_batches(const std::vector<std::vector<int64_t>>& rows, const char* phase, const Handles& lent,
                const std::function<void(const models::TokenBatch&)>& pass, int64_t begin = 0);

/// How well a layer tells the two sets apart: all on prompts kept out of the fit (cross-validation).
struct Separation {
  double accuracy = 0;  ///< % on the right side of the middle
  double auc = 0;       ///< % of pairs, one of each set, in the right order
  double effect = 0;    ///< distance of the means along the direction, in pooled standard deviations
  double size = 0;      ///< ‖direction‖ / mean ‖state‖
  double origin = 0;    ///< coordinate of the negative set's mean along the direction, in its lengths
};

/// One direction a layer.
struct Directions {
  std::string method;              ///< "mean", "pca", "probe"; of a file of others "control vector"
  std::string model, fingerprint;  ///< what it was fitted on
  std::vector<at::Tensor> layers;  ///< [D] float32 on the host, behind each block from 0; undefined: none
  std::vector<Separation> separation;
  int best = 0;  ///< layer with the largest effect
  nlohmann::json about = nlohmann::json::object();

  [[nodiscard]] models::ControlVector control_vector(
      models::LayerRange range = {}) const;      ///< of the layers in the range
  [[nodiscard]] nlohmann::json to_json() const;  ///< all but the tensors
};

struct FitOptions {
  std::string method = "mean";              ///< difference of means, first principal component, logistic probe
  bool chat = true;                         ///< through the chat template, where the model has one
  int folds = 5;                            ///< of the cross-validation; no more than the smaller set has prompts
  std::vector<Directions> apart_from = {};  ///< the new directions get no share of these
};
/// Runs the prompts, takes the residual stream behind each block at their last token, and fits. Throws
/// Error(kInvalidArgument) for fewer than two prompts a set, an unknown method, or sets that no layer tells apart.
[[nodiscard]] Directions fit_directions(const models::Model& model, std::span<const ContrastPrompt> positive,
                                        std::span<const ContrastPrompt> negative, const FitOptions& options = {},
                                        const Handles& lent = {});

/// [D, K] float64: an orthonormal basis of what the columns [D] span. Those that are nothing, or (almost) a mixture of
/// others, give none. Undefined without any.
[[nodiscard]] at::Tensor orthonormal_basis(const std::vector<at::Tensor>& columns);
/// Whether two files hold the same: a control vector lacks block 0, and may hold fewer layers. Equal in every layer
/// that both have, and they have one.
[[nodiscard]] bool same_direction(const Directions& one, const Directions& other);
/// SHA-256 of the values, by layer.
[[nodiscard]] std::string content_of(const Directions& directions);

/// direction.safetensors, atomically.
void save_directions(const std::filesystem::path& path, const Directions& directions);
/// That file, the folder it is in, or a control vector in GGUF. Throws Error(kCorruption) naming the file.
[[nodiscard]] Directions load_directions(const std::filesystem::path& path);

}  // namespace emend::workflow
