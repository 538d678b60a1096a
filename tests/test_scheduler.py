"""The scheduler, its slot tables and the mailbox alone, without a model."""

from types import SimpleNamespace

import numpy as np
import torch

from specdec.core.cache.prefix import keys_of, scored_keys
from specdec.core.cache.tables import SlotTables
from specdec.core.config import EngineConfig
from specdec.core.engine.mailbox import Mailbox
from specdec.core.engine.packing import pack_requests, write_history
from specdec.core.engine.request import Request
from specdec.core.engine.scheduler import Scheduler
from specdec.core.engine.sharing import WORTH_WAITING
from specdec.core.functional.torch_ops import TORCH_OPS
from specdec.core.round.state import MAX_STOP_IDS
from specdec.core.sampling_params import SamplingParams
from specdec.core.text.detokenizer import Detokenizer

CPU = torch.device("cpu")
TAIL = 3


def scheduler_of(max_batch=2, num_slots=1000, page_size=1, width=500, keeps=False):
    rows = EngineConfig(max_batch=max_batch).max_running
    return Scheduler(SlotTables(rows, width, num_slots, page_size, CPU, keeps_prefixes=keeps), TAIL, max_batch)


def request_of(prompt=(5, 6, 7), max_new_tokens=4, stop_ids=()):
    ids, text = list(prompt), Detokenizer(None)
    return Request(ids, np.array([*ids, 0]), max_new_tokens, SamplingParams(), stop_ids, frozenset(), text)


def admitted(scheduler, *requests):
    """Queue `requests` one by one; return which of them run."""
    for request in requests:
        scheduler.add([request])
    scheduler.admit()
    return [r.row is not None for r in requests]


def test_a_free_row_is_taken_but_a_large_batch_refills_in_groups():
    """Three of the four rows beside 32 refill together, for prompts that are prefilled ahead; a request that waits
    alone takes the first free row of any batch."""
    scheduler = scheduler_of(max_batch=32)
    running = [request_of() for _ in range(36)]
    assert all(admitted(scheduler, *running))
    scheduler.release(running[0])
    assert admitted(scheduler, request_of()) == [True]
    scheduler.release(running[1])
    assert admitted(scheduler, *[request_of() for _ in range(4)]) == [False] * 4
    scheduler.release(running[2])
    assert not scheduler.may_admit
    scheduler.release(running[3])
    scheduler.admit()
    assert len(scheduler.running) == 36 and len(scheduler.waiting) == 1
    scheduler.release(running[4])
    scheduler.admit()
    assert len(scheduler.running) == 36 and not scheduler.waiting


def test_prompts_that_are_prefilled_ahead_decode_in_order_where_others_end():
    scheduler = scheduler_of(max_batch=32)
    running = [request_of() for _ in range(36)]
    admitted(scheduler, *running)
    for request in running:
        request.num_prefilled = 3
    assert scheduler.decoding() == running[:32]
    scheduler.release(running[3])
    running[5].num_certain = running[5].max_new_tokens
    assert scheduler.decoding() == [r for r in running[:34] if r not in (running[3], running[5])]


def test_who_has_priority_is_admitted_at_once_and_decodes_before_others_that_are_prefilled_ahead():
    scheduler = scheduler_of(max_batch=32)
    running, last = [request_of() for _ in range(36)], request_of()
    admitted(scheduler, *running)
    last.priority = 1
    scheduler.release(running[0])
    assert admitted(scheduler, *[request_of() for _ in range(8)]) == [False] * 8
    assert admitted(scheduler, last) == [True] and len(scheduler.running) == 36
    for request in scheduler.running:
        request.num_prefilled = 3
    scheduler.release(running[1])
    assert scheduler.decoding() == [*running[2:33], last]


def test_prompts_that_came_together_are_prefilled_before_any_of_them_decodes():
    scheduler, (one, two, late) = scheduler_of(max_batch=3), [request_of() for _ in range(3)]
    scheduler.add([one, two])
    scheduler.admit()
    one.num_prefilled = 3
    assert not scheduler.is_mixed
    admitted(scheduler, late)
    assert scheduler.is_mixed


def test_a_request_whose_last_token_is_on_its_way_plays_no_round():
    scheduler, (one, two) = scheduler_of(), [request_of(), request_of()]
    admitted(scheduler, one, two)
    one.num_prefilled = two.num_prefilled = 3
    one.num_certain, two.num_certain = one.max_new_tokens, two.max_new_tokens - 1
    assert scheduler.decoding() == [two]


def test_what_leaves_before_the_device_knows_it_is_not_told_to_it():
    scheduler, (one, two) = scheduler_of(), [request_of(), request_of()]
    admitted(scheduler, one, two)
    scheduler.release(one)
    assert scheduler.admitted == [two] and one.row is None


def test_a_request_runs_or_waits_after_repair_and_every_row_can_be_taken():
    """As if admission had been interrupted between giving `one` a row and removing it from the queue."""
    scheduler, (one, two) = scheduler_of(), [request_of(), request_of()]
    admitted(scheduler, one)
    scheduler.waiting.extend([one, two])
    scheduler.repair()
    assert list(scheduler.waiting) == [two] and scheduler.running == [one]
    scheduler.admit()
    assert scheduler.running == [one, two]
    scheduler.slot_tables.write(*rows_of(scheduler.slot_tables, [one.row, two.row]))
    scheduler.slot_tables.check_integrity()


def rows_of(tables, rows):
    return torch.tensor(rows), torch.from_numpy(tables.pages_of(rows))


def test_an_error_ends_what_has_not_ended():
    scheduler, (one, two) = scheduler_of(), [request_of(), request_of()]
    admitted(scheduler, one, two)
    one.finish_reason = "length"
    scheduler.fail([one, two], OSError("full"))
    assert (one.finish_reason, one.failure) == ("length", None)
    assert two.finish_reason == "error" and isinstance(two.failure, OSError)


def test_a_request_has_slots_for_all_that_a_round_may_write():
    scheduler = scheduler_of(num_slots=30, width=20)
    assert scheduler.slots_needed(5, 7) == 5 + 7 + TAIL and scheduler.longest_request == 20 - TAIL
    scheduler.slot_tables.check_fits(20)
    assert scheduler_of(num_slots=12, width=20).longest_request == 12 - TAIL


def test_who_shares_a_long_beginning_waits_while_it_is_being_written_and_no_longer():
    prompt = list(range(100))
    scheduler, (one, two) = scheduler_of(keeps=True), [request_of(prompt), request_of(prompt)]
    assert admitted(scheduler, one, two) == [True, False]
    scheduler.release(one)  # abandoned; `one` is still referenced
    scheduler.admit()
    assert two.row is not None
    two.num_prefilled, two.is_kept = len(prompt), False  # its K/V will not be kept: nothing to wait for
    assert admitted(scheduler, request_of(prompt)) == [True]


def test_a_short_beginning_is_not_waited_for():
    scheduler, prompt = scheduler_of(keeps=True), range(WORTH_WAITING - 1)
    assert admitted(scheduler, request_of(prompt), request_of(prompt)) == [True, True]


def test_stop_ids_that_are_not_given_are_no_token():
    (numbers,) = pack_requests([request_of(stop_ids=(9,))])
    assert numbers[3 : 3 + MAX_STOP_IDS].tolist() == [9] + [-1] * (MAX_STOP_IDS - 1)


def test_tokens_that_no_prefill_sees_are_in_the_history():
    """Lookup drafts from the history, also from the cached prefix, up to its last token."""
    state, request = SimpleNamespace(history=torch.zeros(2, 5, dtype=torch.int32)), request_of()
    request.row, request.num_cached = 1, 2
    write_history(state, [request])
    assert state.history.tolist() == [[0] * 5, [5, 6, 0, 0, 0]]


def test_what_was_served_and_scored_gives_way_and_counts_as_free():
    tables, text = SlotTables(2, 8, 8, 1, CPU, keeps_prefixes=True), np.arange(4)
    for keys in (keys_of(text, 0), scored_keys(text)):
        row = tables.reserve(4)
        tables.keep(row, keys)
        tables.release(row)
    assert tables.num_free_pages == 8 and tables.prefixes.num_pages == 3 + 4, "the one is not taken for the other"
    assert tables.reserve(8) is not None and tables.num_free_pages == 0


def test_pages_that_a_request_shares_are_not_taken_to_make_room_for_it():
    tables = SlotTables(2, 12, 8, 1, CPU, keeps_prefixes=True)
    row, text = tables.reserve(6), np.arange(6)
    tables.keep(row, text)
    tables.release(row)
    shared = tables.prefixes.find(text)[:4]
    assert tables.reserve(9, shared) is None and tables.num_free_pages == 8, "a refusal leaves nothing held"
    assert tables.reserve(8, shared) is not None
    assert tables.prefixes.find(text).tolist() == shared.tolist()


def test_results_are_copies_and_come_again_until_the_next_ones_are_asked_for():
    mailbox, packed = Mailbox(CPU, 8, TORCH_OPS.mail), torch.tensor([[1, 2, 3, 4]])
    for number in range(2):
        mailbox.post([request_of()], packed + number, None)
        packed[:] += 10
    mailbox.post([request_of()], packed, None)
    packed.zero_()
    firsts = [next(iter(mailbox.take(0)))[1] for _ in range(2)]
    assert firsts == [[[1, 2, 3, 4]]] * 2 and mailbox.num_pending == 3
    assert [rows[0][0] for _, rows in mailbox.take(1)] == [1, 12]
    assert [rows[0][0] for _, rows in mailbox.take(0)] == [21]
    mailbox.post([request_of()], packed, None)
    mailbox.clear()
    assert mailbox.num_pending == 0
