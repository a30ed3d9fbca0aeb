#include "table_lane.h"

#include <algorithm>

namespace phalanx {
namespace {

// So many keys are asked of memory at a time: a lane's share of a block, whose lines stay in the second cache.
constexpr std::size_t kRun = 512;
// How far ahead of its use a gradient is asked of memory.
constexpr std::size_t kGradientsAhead = 16;
// The most and the least bytes of a segment of a lane's file, and how many of them `max_bytes` should be.
constexpr std::uint64_t kMostSegment = 256 << 10, kLeastSegment = 4096, kSegments = 16;
// Keys of a change for which an index that grows moves a line, so that it ends when no ids are new.
constexpr std::size_t kKeysForLine = 4;

std::size_t segment_bytes(const TableSpec& spec) {
  return std::clamp(spec.max_bytes / (kLanes * kSegments), kLeastSegment, kMostSegment);
}

}  // namespace

Lane::Lane(const TableSpec& spec, const Starter& starter, Arena& arena, int number)
    : spec_(spec), starter_(starter), value_bytes_(spec.value_bytes()),
      slab_(arena, spec.row_bytes(), Entry::kStored, true),
      old_entries_(arena, OldEntry::bytes(spec.row_bytes()), UINT32_MAX, false),
      file_(spec.folder, number, RowCodec(spec), segment_bytes(spec)) {}

// Calls use(i, place in the index) for each key and notes the row of the entry it returns. Keys not in their first line
// come last: they are absent, or in the next line, which is asked for too, or in the other part of an index that grows.
// Only for them may `use` insert.
//
// A request waits in the processor's queue until its page is found, which takes long in large tables. The more of them
// the queue holds, the more pages are looked up at a time: so the loops that ask do nothing else.
template <class Use>
void Lane::find_rows(Slice& slice, Use use) const {
  const auto settle = [&](std::size_t i, Entry* place) {
    const Entry* const entry = use(i, place);
    slice.rows[i] = entry->has_row() ? entry->row : Entry::kEmpty;
  };
  const std::span<const std::uint64_t> hashes = slice.hashes;
  std::array<Entry*, kRun> lines;
  std::array<std::size_t, kRun> late;
  for (std::size_t first = 0; first < hashes.size(); first += kRun) {
    const std::size_t size = std::min(kRun, hashes.size() - first);
    for (std::size_t k = 0; k < size; ++k) {
      lines[k] = index_.home(hashes[first + k]);
      __builtin_prefetch(lines[k]);
    }
    std::size_t waiting = 0;
    for (std::size_t k = 0; k < size; ++k) {
      const std::size_t i = first + k;
      Entry* const place = Places::find_in(lines[k], hashes[i]);
      if (place != nullptr && !place->is_empty()) {
        settle(i, place);
        continue;
      }
      if (place == nullptr) __builtin_prefetch(index_.line_after(lines[k], hashes[i]));
      late[waiting++] = i;
    }
    for (std::size_t k = 0; k < waiting; ++k) settle(late[k], index_.find(hashes[late[k]]));
  }
}

// The same for calls that change entries, before they change rows. What moments need of these is kept, also when there
// is no memory for a row in the midst of them: their ticks say already that they have changed.
template <class Use>
void Lane::change_rows(Slice& slice, Use use) {
  try {
    find_rows(slice, [&](std::size_t i, Entry* place) {
      if (place->tick < watched_ && !place->is_empty()) touched_.push_back(*place);
      return use(i, place);
    });
  } catch (...) {
    preserve_touched();
    throw;
  }
  preserve_touched();
  note_changed(slice);
}

// Calls use(i, row in memory, or null) for each key, having asked for `bytes` of the row.
template <class Use>
void Lane::each_row(const Slice& slice, std::size_t bytes, Use use) const {
  std::array<std::byte*, kRun> rows;
  for (std::size_t first = 0; first < slice.rows.size(); first += kRun) {
    const std::size_t size = std::min(kRun, slice.rows.size() - first);
    for (std::size_t k = 0; k < size; ++k) {
      const std::uint32_t number = slice.rows[first + k];
      rows[k] = Entry::is_in_memory(number) ? slab_.row(number) : nullptr;
      if (rows[k] != nullptr) prefetch(rows[k], bytes);
    }
    for (std::size_t k = 0; k < size; ++k) use(first + k, rows[k]);
  }
}

void Lane::look_up(Slice& slice) const {
  find_rows(slice, [](std::size_t, Entry* place) { return place; });
}

// Gives the values of the keys of a slice that was looked up, but for rows in the file; returns how many have no row.
std::uint64_t Lane::pull_resident(const Slice& slice, float* out) {
  std::uint64_t missing = 0;
  note_pulled(slice);
  each_row(slice, value_bytes_, [&](std::size_t i, const std::byte* row) {
    if (Entry::is_stored(slice.rows[i])) return;
    float* const values = out + slice.positions[i] * spec_.dim;
    missing += row == nullptr;
    if (row != nullptr) {
      load_values(row, spec_.is_bfloat16, values, spec_.dim);
    } else if (spec_.entry.kind != EntryKind::kCount && admits(slice.hashes[i])) {
      start_values(slice.hashes[i], values);
    } else {
      std::fill_n(values, spec_.dim, 0.0f);
    }
  });
  return missing;
}

std::uint64_t Lane::missing(Slice& slice) const {
  look_up(slice);
  return static_cast<std::uint64_t>(std::count(slice.rows.begin(), slice.rows.end(), Entry::kEmpty));
}

// Brings the rows of keys, which are to change, into memory.
void Lane::bring_in(Slice& slice) {
  if (stored() == 0 || slice.departures == departures_) return;
  std::vector<Entry*> entries;
  find_rows(slice, [&](std::size_t, Entry* place) {
    if (place->is_stored()) entries.push_back(place);
    return place;
  });
  if (!entries.empty()) bring_in(entries);
}

std::uint64_t Lane::push(Slice& slice, const Gradients& gradients, const UpdateRule& rule, Time time) {
  bring_in(slice);
  const std::uint64_t dropped = admit(slice, gradients.counts, time);
  std::visit([&](const auto& step) { train(slice, gradients, time, step); }, rule);
  return dropped;
}

template <class Rule>
void Lane::train(const Slice& slice, const Gradients& gradients, Time time, const Rule& rule) {
  std::vector<float> wide(spec_.is_bfloat16 ? spec_.dim : 0);
  each_row(slice, spec_.row_bytes(), [&](std::size_t i, std::byte* row) {
    // A lane takes every 16th gradient or so, in no order that the processor sees, and another process wrote them.
    if (i + kGradientsAhead < slice.positions.size()) {
      prefetch(gradients.values + slice.positions[i + kGradientsAhead] * spec_.dim, spec_.dim * sizeof(float));
    }
    if (row == nullptr) return;
    const std::size_t position = slice.positions[i];
    float* const state = floats(row);
    const float* const gradient = gradients.values + position * spec_.dim;
    if (spec_.is_bfloat16) {
      load_values(row, true, wide.data(), spec_.dim);
      rule(wide.data(), state, gradient, spec_.dim);
      keep(row, slice.hashes[i], time.tick, wide.data());
    } else {
      rule(reinterpret_cast<float*>(row), state, gradient, spec_.dim);
    }
    if (spec_.has_statistics) {
      const float count = gradients.counts != nullptr ? static_cast<float>(gradients.counts[position]) : 1.0f;
      state[spec_.state()] += gradients.shows != nullptr ? gradients.shows[position] : count;
      state[spec_.state() + 1] += gradients.clicks != nullptr ? gradients.clicks[position] : 0.0f;
    }
  });
}

void Lane::add(Slice& slice, const float* deltas, Time time) {
  make(slice, time);
  std::vector<float> sum(spec_.dim);
  each_row(slice, value_bytes_, [&](std::size_t i, std::byte* row) {
    const float* const delta = deltas + slice.positions[i] * spec_.dim;
    load_values(row, spec_.is_bfloat16, sum.data(), spec_.dim);
    for (std::size_t j = 0; j < spec_.dim; ++j) sum[j] += delta[j];
    keep(row, slice.hashes[i], time.tick, sum.data());
  });
}

void Lane::assign(Slice& slice, const float* values, Time time) {
  make(slice, time);
  each_row(slice, value_bytes_, [&](std::size_t i, std::byte* row) {
    store_nearest(row, spec_.is_bfloat16, values + slice.positions[i] * spec_.dim, spec_.dim);
  });
}

// Finds the rows of gradients, making them as the entry policy says; returns how many keys have none.
std::uint64_t Lane::admit(Slice& slice, const std::uint32_t* counts, Time time) {
  const std::uint32_t tick = time.shortened(time.tick);
  std::uint64_t dropped = 0;
  index_.move(slice.hashes.size() / kKeysForLine);
  change_rows(slice, [&](std::size_t i, Entry* place) {
    const std::uint32_t count = counts != nullptr ? counts[slice.positions[i]] : 1;
    if (!place->has_row()) place = admit_one(place, slice.hashes[i], count);
    if (!place->is_empty()) place->tick = tick;
    dropped += !place->has_row();
    return place;
  });
  return dropped;
}

// Decides about an id without a row, which occurred `count` times. Returns its entry, or an empty place.
Entry* Lane::admit_one(Entry* entry, std::uint64_t hash, std::uint32_t count) {
  if (spec_.entry.kind == EntryKind::kCount) {
    const std::uint64_t seen = (entry->is_waiting() ? entry->waited() : 0) + std::uint64_t{count};
    if (seen < spec_.entry.count) {
      entry = occupied(entry, hash);
      entry->row = Entry::kWaiting + static_cast<std::uint32_t>(seen);
      return entry;
    }
  } else if (!admits(hash)) {
    return entry;
  }
  return with_row(entry, hash);
}

// Finds the rows of keys, making those that are missing, whatever the entry policy.
void Lane::make(Slice& slice, Time time) {
  bring_in(slice);
  const std::uint32_t tick = time.shortened(time.tick);
  index_.move(slice.hashes.size() / kKeysForLine);
  change_rows(slice, [&](std::size_t i, Entry* place) {
    Entry* const entry = place->has_row() ? place : with_row(place, slice.hashes[i]);
    entry->tick = tick;
    return entry;
  });
}

// Returns the entry of a hash, which may be new and then has an empty row that the caller sets at once.
Entry* Lane::occupied(Entry* entry, std::uint64_t hash) {
  if (!entry->is_empty()) return entry;
  entry = index_.insert(hash, entry);
  bump(entries_, 1);
  return entry;
}

// Starts the row of an id that has none.
Entry* Lane::with_row(Entry* entry, std::uint64_t hash) {
  entry = with_place(entry, hash);
  std::byte* const memory = slab_.row(entry->row);
  if (spec_.is_bfloat16) {
    std::vector<float> values(spec_.dim);
    starter_.fill(hash, values.data(), spec_.dim);
    store_nearest(memory, true, values.data(), spec_.dim);
  } else {
    starter_.fill(hash, reinterpret_cast<float*>(memory), spec_.dim);
  }
  std::copy(spec_.initial_state.begin(), spec_.initial_state.end(), floats(memory));
  if (spec_.has_statistics) std::fill_n(floats(memory) + spec_.state(), 2, 0.0f);
  return entry;
}

// Gives an id that has none a row of undefined content.
Entry* Lane::with_place(Entry* entry, std::uint64_t hash) {
  const std::uint32_t row = take_place();
  entry = occupied(entry, hash);
  entry->row = row;
  bump(rows_, 1);
  bump(resident_, 1);
  return entry;
}

// Writes trained values: in bfloat16 a small step must not always round to none.
void Lane::keep(std::byte* row, std::uint64_t hash, std::uint64_t tick, const float* values) {
  if (spec_.is_bfloat16) {
    store_stochastic(row, starter_.number_of(hash), tick, values, spec_.dim);
  } else {
    store_nearest(row, false, values, spec_.dim);
  }
}

// Whether the entry policy lets an id in by what it is, not by how often it came.
bool Lane::admits(std::uint64_t hash) const {
  if (spec_.entry.kind != EntryKind::kProbability) return true;
  const std::uint64_t draw = mix64(starter_.number_of(hash) ^ kAdmission) >> 11;
  return static_cast<double>(draw) * 0x1p-53 < spec_.entry.probability;
}

void Lane::start_values(std::uint64_t hash, float* values) const {
  starter_.fill(hash, values, spec_.dim);
  if (spec_.is_bfloat16) {
    for (std::size_t j = 0; j < spec_.dim; ++j) values[j] = widened(nearest(values[j]));
  }
}

}  // namespace phalanx
