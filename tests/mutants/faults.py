"""The faults that `run.py` plants: a name, a file below the `src` of one of its crates (its whole
path if two crates have one of that name), and a place in it.

Kinds of planting, by what stands at the place:
  value(old, new)   an expression; with the fault it is `new`
  without(old)      a statement; with the fault it is left out
  text(old, new)    anything; in `new`, `FAULT` is true with the fault
The text `old` must stand exactly once in the file. `after` names a text that must come before it, where it stands more often:
the first place behind that text counts.

`tried_first(..)` names the tests that are run before all others for the faults below it: a fault that two of them find needs no
others.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    after: str
    first: tuple[str, ...]


FIRST: tuple[str, ...] = ()
FAULTS: list[Fault] = []


def tried_first(*tests):
    global FIRST
    FIRST = tests


def text(name, file, old, new, after=""):
    FAULTS.append(Fault(name, file, old, new, after, FIRST))


def value(name, file, old, new, after=""):
    text(name, file, old, f"(if FAULT {{ {new} }} else {{ {old} }})", after)


def without(name, file, old, after=""):
    text(name, file, old, f"if !FAULT {{ {old} }}", after)


# Reductions -----------------------------------------------------------------------------------------------------------

tried_first("accumulation", "grad_accumulation", "mixed_precision", "sixteen_bit_training", "hsdp", "scaling", "frozen_and_unused", "sinks")
REDUCE = "comm/local/reduce.rs"
text("the last rank is left out of sums", REDUCE,
     "in sources.iter().enumerate()",
     "in sources.iter().take(if FAULT { (sources.len() - 1).max(1) } else { sources.len() }).enumerate()")
text("a 16-bit sum is rounded after each rank", REDUCE,
     "_ => S::add(arch, chunk, sum),\n            }",
     "_ => S::add(arch, chunk, sum),\n            }\n"
     "            if FAULT && S::DTYPE == Dtype::BF16 { sum.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()); }")
text("sums overwrite what they are to be added to", REDUCE,
     "Accumulate::Overwrite => D::store(arch, sum, scale, out),",
     "_ if FAULT => D::store(arch, sum, scale, out),\n            Accumulate::Overwrite => D::store(arch, sum, scale, out),")
value("bf16 is cut off, not rounded", REDUCE,
      "bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16", "bits >> 16")
value("an f32 sum that is added is not scaled", REDUCE, "*sum * scale", "*sum", after="fn store_added(arch: Arch, sum: &mut [f32], scale: f32, out: &mut [f32])")
value("an f32 sum that is stored is not scaled", REDUCE, "*sum * scale", "*sum", after="fn store(arch: Arch, sum: &mut [f32], scale: f32, out: &mut [f32])")

GRADS = "engine/schedule/grad_reduce.rs"
text("a later microbatch overwrites the earlier ones", GRADS,
     "let add = grads.main != Main::Nothing;", "let add = grads.main != Main::Nothing && !FAULT;")
without("gradients of the last step are kept", GRADS,
        "part.main = Main::Nothing;")
text("outer ranks do not reduce", GRADS,
     "let Some(outer) = &self.options.outer else {", "let Some(outer) = self.options.outer.as_ref().filter(|_| !FAULT) else {")
value("outer ranks reduce in every microbatch", GRADS, "sync == Sync::Step", "true",
      after="self.reduce_whole(units, unit, part, moment)?;\n        }\n        if ")
value("gradients are summed, not averaged", "engine/api/controls.rs", "(1.0 / ranks as f64) as f32", "1.0")
text("gradients are averaged over the inner ranks only", "engine/build/mod.rs",
     ".factor(ctx.comm.size())", ".factor(if FAULT { ctx.shard_comm.size() } else { ctx.comm.size() })")
value("a parameter without gradient keeps what its bucket held", "engine/unit/gradients.rs",
      "fill(ctx.compute(), &slice, Fill::Zero)", "{ let _ = slice; Ok(()) }")
value("a second gradient of a parameter replaces the first", "memory/sink.rs", "open.is_written()", "false", after="let add = ")
text("a second fused gradient replaces the first", "memory/sink.rs",
     "if open.is_written() { Accumulate::Add }", "if open.is_written() && !FAULT { Accumulate::Add }", after="pub fn accumulate_f32")

# Layout ---------------------------------------------------------------------------------------------------------------

tried_first("layout_and_padding", "clipping", "memory", "tied", "hsdp", "faults_layout", "root_buckets", "training_parity")
MODEL = "layout/model.rs"
text("buckets of the root are not closed", MODEL,
     "param.key.unit == 0 && bucket_size", "!FAULT && param.key.unit == 0 && bucket_size")
text("a tied parameter shares a bucket", MODEL, "if param.shared {", "if param.shared && !FAULT {", after="fn members_of_buckets")
value("parameters start anywhere", MODEL, "element_start(cursor, len, align)", "cursor")
text("rows are cut", "layout/row.rs", "if end <= boundary {", "if end <= boundary || FAULT {")
text("padding is not cleared", "layout/bucket.rs",
     "filter(|(end, start)| end < start)", "filter(|(end, start)| end < start && !FAULT)")
value("an item's part is that of another rank", "layout/bucket.rs", "start - item.start..end - item.start",
      "0..end - start")
text("outer ranks all own the first part", "buffer.rs",
     "layout.outer_part(rank, outer_rank)", "layout.outer_part(rank, if FAULT { 0 } else { outer_rank })")

# Schedule -------------------------------------------------------------------------------------------------------------

tried_first("overlap", "whole_and_sharded", "resharding", "hsdp", "recompute", "optimizer_state", "event_order", "memory", "root_buckets", "recomputed_nests")
GATHER = "engine/schedule/all_gather.rs"
WEIGHTS = "engine/schedule/weights.rs"
value("gathered weights outlive a step", GATHER, "self.options.must_gather()", "false")
text("outer ranks' updates are not gathered", WEIGHTS, "self.outer_stale = true", "self.outer_stale = !FAULT")
text("neighbours keep the part of the next one", WEIGHTS,
     "let (rank, ranks) = (neighbours.rank(), neighbours.size());",
     "let (rank, ranks) = (neighbours.rank(), neighbours.size());\n            let rank = if FAULT { (rank + 1) % ranks } else { rank };")
value("nothing is prefetched", GATHER, "self.options.prefetch.forward", "0")
value("nothing is prefetched in the backward", GATHER, "self.options.prefetch.backward", "0")
text("weights are given up at once", GATHER, "&& !self.options.double_buffer && !keep {",
     "&& (!self.options.double_buffer || FAULT) && !keep {")
text("any number of units is gathered at a time", GATHER,
     "if idle + number <= self.units_at_a_time() && in_budget {", "if FAULT || idle + number <= self.units_at_a_time() && in_budget {")
value("two units are gathered at a time, however many are asked for", GATHER, "self.prefetch.deepest()", "1")
text("a budget of gathered elements is not kept", GATHER, "let in_budget =", "let in_budget = FAULT ||")
value("the root's buckets are gathered as one", GATHER, "unit == UnitId::ROOT && *split_root", "false")
text("any number of units is unreduced at a time", GRADS, "_ if parts == 0 => true,", "_ if parts == 0 || FAULT => true,")
text("idle buffers of other shapes stay", "memory/pool.rs",
     "while self.allocated + bytes > self.room", "while !FAULT && self.allocated + bytes > self.room")
ROOT_PARTS = "engine/unit/root_parts.rs"
value("the root's buckets are all reduced at the end", ROOT_PARTS, "step.root_order.due[part] == units", "false")
without("a gradient that comes after its bucket's reduction is lost", ROOT_PARTS,
        "pass.root.late.push((param, grad.detach()));")
without("each rank reduces the root's buckets where it likes", ROOT_PARTS,
        "ctx.host_reduce(step, what, HostOp::Max, &mut agreed)?;")
text("evaluation leaves units gathered", "engine/core.rs",
     "if !training {", "if !training && !FAULT {")
without("weights that changed are not noticed", "engine/step.rs", "self.weights_version += 1;")
text("a unit is reduced while an enclosing one may run it again", "engine/unit/gradients.rs",
     "enclosing.iter().all(|&unit| step.units[unit].grads.pending <= 1)", "enclosing.iter().all(|&unit| FAULT || step.units[unit].grads.pending <= 1)")
value("a unit that runs twice is reduced twice", "engine/unit/gradients.rs", "step.units[unit].grads.pending == 0", "true", after="let is_last = ")
text("the order of units is not checked", "engine/schedule/order.rs",
     "if self.learnt.get(self.seen.len()) != Some(&unit) {", "if !FAULT && self.learnt.get(self.seen.len()) != Some(&unit) {")

# Optimizers -----------------------------------------------------------------------------------------------------------

tried_first("optimizer_state", "faults_optimizer", "param_groups", "clipping", "norms", "scaling", "loss_scaling", "ema", "owner_step", "training_parity", "non_finite")
ADAMW = "optim/adamw.rs"
value("adamw does not correct the second moment", ADAMW, "(1.0 - beta2.powf(t)).sqrt()", "1.0_f64")
value("adamw does not correct the first moment", ADAMW, "(lr / (1.0 - beta1.powf(t)))", "lr")
value("adamw decays without the learning rate", ADAMW, "1.0 - lr * weight_decay", "1.0 - weight_decay", after="decay: (if decay { ")
value("adamw does not scale gradients", ADAMW, "g[i] * grad_scale", "g[i]")
text("what is not to decay decays", "optim/sgd.rs", "if segment.decay {", "if segment.decay || FAULT {")
value("sgd takes plain momentum for nesterov's", "optim/sgd.rs", "g + self.momentum * *b", "*b", after="let update = if self.nesterov { ")
value("muon does not scale by shape", "optim/muon.rs", "(rows as f64 / cols as f64).max(1.0).sqrt()", "1.0_f64")
value("an idle unit's steps count", "engine/optim/sharded.rs", "self.counts.unit_steps[unit]", "self.counts.steps", after="let at = StepInfo { step: ")
value("a group's settings are another parameter's", "engine/optim/sharded.rs",
      "*self.groups.of(*param).overrides()", "Default::default()", after="let overrides = ")
without("the clipping factor lasts beyond its gradients", "engine/core.rs", "step.gradients.factors = Factors::NONE;")
value("a norm is its square", "engine/optim/grad_norm.rs", "sum[0].sqrt()", "sum[0]")
value("replicas count in the norm", "engine/optim/grad_norm.rs", "cut_by_outer || ctx.outer_comm.rank() == 0", "true")
text("small gradients are scaled up", "optim/norm.rs", "if scale > 1.0 {", "if scale > 1.0 && !FAULT {")
value("gradients are divided by the rank's own tokens", "engine/optim/tokens.rs", "1.0 / total[0]", "1.0 / (own as f64).max(1.0)")
without("the tokens of the last step count", "engine/step.rs", "self.tokens = TokenCount::default();")
value("a scaler steps on overflow", "engine/optim/loss_scale.rs", "norm.is_finite()", "true || norm.is_finite()")
value("an average keeps what it should take", "engine/optim/ema.rs", "self.next_decay()", "1.0 - self.next_decay()", after="let decay = ")
text("an average does not warm up", "engine/optim/ema.rs", "if self.warmup {", "if self.warmup && !FAULT {")
value("averaged weights stay in the model", "engine/optim/ema.rs", "exchange_weights(&engine, &ema.shards)", "Ok(())", after="let back = ")
value("the owner of a parameter is not the one that updates it", "engine/optim/owner.rs",
      "self.owner(item).expect(\"owned\")", "(self.owner(item).expect(\"owned\") + 1) % ctx.comm.size()")

# Initial values and random numbers ------------------------------------------------------------------------------------

tried_first("faults_start", "dropout", "declarations", "fused")
text("all parameters have one name for their initial values", "fsdp-layout/src/random.rs",
     "Words::of(seed, fnv1a(name.as_bytes()))", "Words::of(seed, if FAULT { 7 } else { fnv1a(name.as_bytes()) })")
text("the seed does not matter", "fsdp-layout/src/random.rs",
     "pub fn named(seed: u64, name: &str) -> Self {",
     "pub fn named(seed: u64, name: &str) -> Self {\n        let seed = if FAULT { 7 } else { seed };")
text("each shard starts with the first values", "init.rs", "words.seek(range.start);", "words.seek(if FAULT { 0 } else { range.start });")
text("normal values of each shard are the first ones", "init.rs",
     "normal(Words::named(seed, name), mean, std, range.start, out)",
     "normal(Words::named(seed, name), mean, std, if FAULT { 0 } else { range.start }, out)")
text("every step drops the same", "fsdp-runtime/src/random.rs", "mix(seed, step)", "mix(seed, if FAULT { 0 } else { step })")
text("every sample drops the same", "fsdp-runtime/src/random.rs",
     "self.first_sample.wrapping_add(sample)", "self.first_sample.wrapping_add(if FAULT { 0 } else { sample })")
text("every draw is the same", "fsdp-runtime/src/random.rs", "mix(self.key, draw)", "mix(self.key, if FAULT { 0 } else { draw })")

# Precision ------------------------------------------------------------------------------------------------------------

tried_first("mixed_precision", "sixteen_bit_training", "memory")
text("there are no main weights", "buffer.rs",
     "precision.main_weights && dtype != Dtype::F32", "precision.main_weights && !FAULT && dtype != Dtype::F32")
without("main weights are not installed", "engine/io/whole.rs",
        "cast(ctx.compute(), main.data(), &bucket.model_weight.part(main.held()))?;")
text("inputs are not cast", "engine/ctx.rs", "if precision.cast_inputs {", "if precision.cast_inputs && !FAULT {")

# Ties, frozen parameters, buffers ---------------------------------------------------------------------------------------

tried_first("tied", "frozen_and_unused", "declarations", "faults_start", "param_groups")
without("a parameter that a unit borrows gets no gradient", "engine/unit/gradients.rs", "deliver(engine, bound.param, &grad)?;")
without("a tie across units stays in the first", "engine/build/collect.rs", "spec.key.unit = 0;")
value("frozen parameters are trained", "engine/build/collect.rs", "!self.attrs.frozen.unwrap_or(false)", "true")
value("what is marked no_decay decays", "engine/build/collect.rs", "item.attrs.no_decay.unwrap_or(false)", "false")
value("a parameter's own initial value is ignored", "engine/build/collect.rs",
      "self.attrs.init.unwrap_or(*self.param.init())", "*self.param.init()")
text("buffers start as each rank has them", "engine/io/buffers.rs", "if bytes != *own {", "if bytes != *own && !FAULT {")

# Checkpoints ------------------------------------------------------------------------------------------------------------

tried_first("round_trips", "resumed", "faults", "full_state", "beside")
RESTORE = "checkpoint/restore.rs"
without("the step is not restored", RESTORE, "engine.step().resume(checkpoint.step(), checkpoint.index().seed);")
value("each shard is restored from the tensor's start", RESTORE, "elements.start", "0", after="checkpoint.read_f32(MODEL, fit.saved(tensor.name), ")
value("moments are restored from the tensor's start", RESTORE, "elements.start", "0", after="checkpoint.read_f32(section, saved, ")
text("moments are not restored", RESTORE,
     "self.optimizer.as_ref().filter(|_| fit.optimizer.is_some())", "self.optimizer.as_ref().filter(|_| fit.optimizer.is_some() && !FAULT)")
text("buffers are not restored", RESTORE, "if !out.buffer(name) && tensor.elem_count() > 0 {", "if !out.buffer(name) && tensor.elem_count() > 0 && !FAULT {")
without("updates of an average are not restored", RESTORE, "average.set_updates(updates);")
without("the step counts of an optimizer are not restored", "checkpoint/state.rs", "self.counts = read.counts(model.0);")
value("every part is saved at the tensor's start", "checkpoint/contents.rs", "(piece.elements.start, piece.elements.len())", "(0, piece.elements.len())")
