"""The policy that picks a shape for each round, on a simulated clock with given costs and acceptance."""

import random

import pytest

from specdec.core.config import Shape
from specdec.core.engine.policy import STAY, CostTable, Policy

SHAPES = (Shape(0, 1, 1), Shape(3, 1, 4), Shape(5, 4, 24))
# ms of a round (plain, chain, tree) by batch: an 8B model on a GPU; a small one on a CPU (100: its batch of 4)
COSTS = {1: (4.2, 4.95, 6.0), 8: (4.4, 5.6, 9.0), 32: (5.3, 7.3, 30.0), 100: (60.0, 110.0, 260.0)}
CATCH_UP = 0.15  # as a share of a plain round


def table(costs=COSTS, long=1.3):
    rows = {bucket: (row, tuple(ms * long for ms in row)) for bucket, row in costs.items()}
    return CostTable(rows, (512, 8192), {bucket: CATCH_UP * row[0] for bucket, row in costs.items()})


def chances(p, shape, gain):
    """Return each draft's acceptance rate, given the one before: a tree accepts like `gain` independent chains."""
    return [1 - (1 - p) ** (gain if shape.topk > 1 else 1)] * shape.num_steps


def draw(rng, shape, p, gain):
    emitted = 1
    for chance in chances(p, shape, gain):
        if rng.random() >= chance:
            break
        emitted += 1
    return emitted


def expected(shape, p, gain):
    total = path = 1.0
    for chance in chances(p, shape, gain):
        path *= chance
        total += path
    return total


def play(policy, bucket, law, gain, rounds, real=COSTS, context=512, tells_time=False):
    """Return the tokens per ms of `policy`, results one round late, over those of fixed shapes and of an oracle."""
    rng, tokens, ms, before, late = random.Random(0), 0, 0.0, 1, None
    fixed, best = [0.0] * len(SHAPES), [0.0, 0.0]
    batch = 4 if bucket == 100 else bucket
    for number in range(rounds):
        rates = law(number, batch)
        index = policy.choose(bucket, context)
        took = real[bucket][index]
        ms += took + (CATCH_UP * real[bucket][0] if index and not before else 0)
        if tells_time:
            policy.note_time(index, bucket, context, took)
        before, lens = index, [draw(rng, SHAPES[index], p, gain) for p in rates]
        tokens += sum(lens)
        if late:
            policy.note(*late)
        late = index, lens
        if number < 400:  # rates repeat after that
            means = [sum(expected(shape, p, gain) for p in rates) for shape in SHAPES]
            fixed = [n + mean / cost for n, mean, cost in zip(fixed, means, real[bucket], strict=True)]
            top = max(range(len(SHAPES)), key=lambda i: means[i] / real[bucket][i])
            best = [best[0] + means[top], best[1] + real[bucket][top]]
    mine = tokens / ms
    return mine / (fixed[0] / 400), mine / (max(fixed) / 400), mine / (best[0] / best[1])


def steady(p):
    return lambda number, batch: [p] * batch


def flips(low, high):
    return lambda number, batch: [high if number // 200 % 2 else low] * batch


def halves(number, batch):
    return [0.1] * (batch // 2) + [0.9] * (batch - batch // 2)


@pytest.mark.parametrize("gain", [1.0, 2.5])
@pytest.mark.parametrize("bucket", COSTS)
def test_it_is_never_slower_than_plain_or_the_best_fixed_shape(bucket, gain):
    for law in (*map(steady, (0.0, 0.3, 0.5, 0.7, 0.85, 0.95)), halves):
        rounds = 10000 if bucket != 32 else 2000  # 100,000 in all with each gain
        over_plain, over_best, _ = play(Policy(SHAPES, table()), bucket, law, gain, rounds)
        assert over_plain >= 0.98 and over_best >= 0.97, (law, over_plain, over_best)


@pytest.mark.parametrize("bucket", COSTS)
@pytest.mark.parametrize("low, high, least", [(0.5, 0.95, 0.95), (0.1, 0.85, 0.87)])
def test_it_follows_acceptance_that_flips_every_200_rounds(bucket, low, high, least):
    """Where no drafting shape pays half of the time, probes, 1% of it, notice this 10 to 50 rounds late."""
    over_plain, over_best, over_oracle = play(Policy(SHAPES, table()), bucket, flips(low, high), 1.7, 8000)
    assert over_plain >= 0.98 and over_best >= 0.97 and over_oracle >= least, (over_plain, over_best, over_oracle)


@pytest.mark.parametrize("wrong", [(4.2, 4.95, 2.0), (4.2, 2.0, 6.0), (8.4, 9.9, 12.0)])
def test_measured_times_correct_the_table(wrong):
    policy = Policy(SHAPES, table({1: wrong}))
    for p in (0.0, 0.7):
        over_plain, over_best, _ = play(policy, 1, steady(p), 1.2, 6000, tells_time=True)
        assert over_plain >= 0.98 and over_best >= 0.96, (over_plain, over_best)


def test_a_switch_of_few_requests_needs_two_decisions_and_a_stay():
    """Only the short chain and plain decoding pay here."""
    costs = table({1: (4.2, 4.95, 60.0)}, long=1.0)
    policy, chosen = Policy(SHAPES, costs), []
    for _ in range(40):
        chosen.append(policy.choose(1, 512))
        policy.note(chosen[-1], [1])
    assert STAY < chosen.index(0) < 4 * STAY, "however bad it is"
    assert not any(chosen[chosen.index(0) :])
    policy, chosen = Policy(SHAPES, costs), []
    while 0 not in chosen:
        chosen.append(policy.choose(1, 512))
        policy.note(chosen[-1], [4 if len(chosen) < 31 and len(chosen) != 20 else 1])
    assert 33 <= len(chosen) < 120 and policy.num_switches == 2, "one bad round is none"
    assert policy.switches[-1].startswith(f"round {len(chosen)}: 3:1:4 (") and "better in two" in policy.switches[-1]


def test_many_requests_switch_after_a_round():
    policy = Policy(SHAPES, table())
    chosen = [policy.choose(32, 512) for _ in range(6) if policy.note(1, [4] * 32) is None]
    policy.note(1, [1] * 32)
    assert chosen == [1] * 6 and policy.choose(32, 512) == 0


def test_a_trial_of_a_tree_while_acceptance_changes_is_one_of_many():
    policy = Policy(SHAPES, table())
    for _ in range(20):
        policy.note(1, [3] * 64)
    for _ in range(30):
        policy.note(2, [6] * 64)  # the best possible, which the model did not predict
        policy.note(1, [3] * 64)
    good = policy.expected(2)
    policy.note(2, [1] * 64)
    assert 0.9 * good < policy.expected(2) < good


def test_a_chain_tried_while_acceptance_changes_says_little_of_chains():
    policy = Policy((*SHAPES[:2], Shape(5, 1, 6)), table())
    for _ in range(20):
        policy.note(1, [1] * 60 + [2] * 4)
    wanted = policy.expected(2) - policy.expected(1)
    policy.note(2, [5] * 64)  # far more than the last rounds predict
    for _ in range(2):
        policy.note(1, [1] * 60 + [2] * 4)
    assert policy.expected(2) - policy.expected(1) < wanted + 0.01


def test_a_shorter_chain_is_expected_to_accept_what_the_one_in_use_does():
    policy = Policy((*SHAPES[:2], Shape(5, 1, 6)), table({64: (10.0, 12.0, 12.5)}))
    for _ in range(40):
        policy.choose(64, 512)
        policy.note(2, [4] * 64)
    shorter, longer = policy.expected(1), policy.expected(2)
    for _ in range(4):
        policy.note(1, [1] * 64)  # chance, or changed acceptance: drafts are the same, so it is not the chain
        policy.note(2, [4] * 64)
    assert shorter > 3 and policy.expected(1) == pytest.approx(shorter, rel=0.02)
    assert policy.expected(2) == pytest.approx(longer, rel=0.02)


def test_what_rounds_take_in_another_context_holds_for_shapes_that_are_not_in_use():
    policy = Policy(SHAPES, table(long=1.0))
    for index in (0, 1, 2, 1):
        for _ in range(40):
            policy.note_time(index, 1, 512, COSTS[1][index])
    for _ in range(60):
        policy.note_time(1, 1, 8192, 1.4 * COSTS[1][1])
    ratios = [policy.costs_ms(i)[1] / ms for i, ms in enumerate(COSTS[1])]
    assert max(ratios) < 1.4 and min(ratios) > 1.3, ratios
    assert policy.costs_ms(1)[8] == COSTS[8][1], "but not for other batches"


def test_a_slight_lead_that_lasts_is_followed():
    for rates, num in (((0.2, 0.340, 0.331), 47), ((0.2, 0.340, 0.337), 99)):  # the 48th decision; never
        policy = Policy(SHAPES, table())
        policy.choose(1, 512)
        policy._switch(2, rates, "to begin with")
        policy._rates = lambda bucket, context, rates=rates: list(rates)
        policy._maybe_probe = lambda rates, batch: None
        assert [policy.choose(1, 512) for _ in range(99)] == [2] * num + [1] * (99 - num)


def test_another_bucket_decides_anew():
    policy = Policy(SHAPES, table(long=1.0))
    for _ in range(50):
        index = policy.choose(1, 512)
        policy.note(index, [SHAPES[index].num_steps + 1])
    assert policy.index == 2, "a tree at batch 1"
    assert policy.choose(9, 512) == 1, "which is too dear at 32"
    assert policy.choose(1, 512) == 2
    assert policy.choose(200, 512) != 2, "a larger batch than the largest bucket takes its costs"


def test_costs_lie_on_a_line_between_contexts():
    rows = {1: ((4.0, 5.0, 9.0), (8.0, 20.0, 60.0))}
    policies = [Policy(SHAPES, CostTable(rows, (512, 8192), {1: 0.5})) for _ in range(2)]
    assert policies[0].choose(1, 512) == 1
    assert policies[1].choose(1, 8192) == 0, "drafts cost more than they bring in a long context"


def test_the_draft_follows_plain_rounds_where_that_costs_a_hundredth_of_them_at_most():
    costs = CostTable({8: ((5.0, 6.0), (5.0, 6.0)), 128: ((7.0, 12.0), (7.0, 12.0))}, (1, 2), {8: 1.5, 128: 2.3})
    policy = Policy(SHAPES[:2], costs)
    assert policy.keeps_up(1) and policy.keeps_up(8) and not policy.keeps_up(9)


def test_admissions_bring_probes_forward():
    counts = []
    for admits in (False, True):
        policy = Policy(SHAPES, table())
        for number in range(3000):
            policy.note(policy.choose(100, 512), [1, 1, 1, 1])
            if admits and number % 20 == 0:
                policy.note_admission()
        counts.append(policy.num_probes)
    assert 10 < counts[0] <= counts[1], "but never more than their share of the time"
