// What --save writes.
#pragma once

#include <emend/editors/transaction.h>

#include "../run_directory.h"
#include "documents.h"
#include "options.h"

namespace emend::tools {

/// Before anything is computed: can what --save names be written for this model? Throws Error(kUnsupported) if not.
void check_outputs(const EditOptions& options, const models::Model& model);

/// Writes the pack, the model, the adapter or the GGUF file that --save names, and records their paths. The model
/// folder gets a ledger, so that the edit can be taken out of it again. Takes the edit out of the model in memory where
/// a file has to be made from the unedited weights: call it last.
void save_outputs(const EditOptions& options, const RunDirectory& folder, const datasets::FactSet& facts,
                  const models::Model& model, editors::EditTransaction& transaction, const Log& log, RunRecord& record);

}  // namespace emend::tools
