// What the recipes share: headers of the library, and their list. One function a file; main.cpp runs one by its name.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/editors/steps/prompts.h>
#include <emend/models/placing.h>
#include <emend/models/trace.h>
#include <emend/workflow/session.h>

#include <iomanip>
#include <iostream>

#define RECIPES(X)                                                                                      \
  X(causal_tracing)                                                                                     \
  X(head_patching) X(linear_probe) X(new_method) X(custom_loss) X(custom_metric) X(sweep) X(logit_lens) \
      X(head_knockout) X(several_models)
#define DECLARE_RECIPE(name) void name(const std::string& model_path, const std::string& hparams);
RECIPES(DECLARE_RECIPE)
