// Methods that remember, with small hyper-parameters for the tiny models.
#pragma once

#include <emend/editors/registry.h>

#include <memory>
#include <string>

namespace emend::testing {

inline std::string sequential_yaml(const std::string& more = "") {
  return "layers: [1, 2]\nv_num_grad_steps: 6\nv_lr: 0.1\n" + more;
}
inline const std::string kAlphaEdit = sequential_yaml("nullspace_threshold: 1\nL2: 2\n");
inline const std::string kMemit = sequential_yaml("mom2_update_weight: 3\n");

inline std::unique_ptr<editors::Editor> make_sequential(const std::string& name, const std::string& yaml,
                                                        const models::Model& model) {
  return editors::make_editor(name, hparams::parse_hparams(yaml, "test.yaml"), model);
}

}  // namespace emend::testing
